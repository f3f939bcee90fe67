"""Windows from an S3 server behind a link of a stated rate, beside raw ranged reads of the same bytes.

Beside s3.py, where a server on the same machine is as fast as memory: here the link is what limits, as it does where
the server is another machine. Each rate gets a network namespace of its own with a token bucket on its loopback device
(Linux; unshare, ip, tc), a ministack server, and rounds of both sides: raw reads by bare obstore, and one epoch of a
new reader, as a whole and between the first batches of its second and last block (see `epoch` in s3.py).

python benchmarks/data/link.py FOLDER [--mbit 500 1000 2000 4000] [--shards 16] [--rounds 3]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import pytest
from corpus import flat_tokens, machine, write_split
from s3 import epoch, ranges, read_all, through_obstore
from support import ministack

from phalanx.objects import ObjectStore, StorageSettings, open_store

IN_NAMESPACE = 'ip link set lo up && exec "$@"'


def measure(store: ObjectStore, read: Callable[[str, int, int], object], mbit: int, rounds: int) -> None:
    """Rounds of both sides, after one that is not counted. read: one range, raw."""
    wanted = ranges(store, [info.key for info in store.list() if info.key.endswith(".tar")])
    total_mb = sum(stop - start for _, start, stop in wanted) / 1e6
    subprocess.run(
        ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"],
        check=True,
    )
    rates: list[tuple[float, float, float]] = []
    cpu_s_gb: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        start, cpu = time.perf_counter(), time.process_time()
        read_all(read, wanted)
        middle, raw_cpu = time.perf_counter(), time.process_time() - cpu
        found = epoch(store, None)
        assert found is not None, "fewer than three blocks have nothing between blocks"
        if number:
            rates.append((total_mb / (middle - start), total_mb / (time.perf_counter() - middle), found.mb_s))
            cpu_s_gb.append((1000 * raw_cpu / total_mb, 1000 / found.mb_cpu_s))
    raw_cpu, own_cpu = (median(side) for side in zip(*cpu_s_gb, strict=True))
    print(
        f"{mbit:,} Mbit/s: raw {median(raw for raw, _, _ in rates):.0f} MB/s; "
        f"CPU of the client, s a GB: raw {raw_cpu:.2f}, reader between blocks {own_cpu:.2f}"
    )
    for side, name in (1, "reader to the hand-off, an epoch"), (2, "between blocks"):
        ratios = [each[side] / each[0] for each in rates]
        print(
            f"  {name}: {median(each[side] for each in rates):.0f} MB/s, "
            f"ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def inside(folder: Path, mbit: int, shards: int, rounds: int) -> None:
    """In the namespace: a server, the split on it, then the limit and the rounds."""
    logs = folder / f"server-{uuid.uuid4().hex[:8]}"
    logs.mkdir(parents=True)
    with ministack.running(ministack.required_executable(), logs) as endpoint, pytest.MonkeyPatch.context() as patch:
        ministack.set_environ(patch, endpoint.credentials)
        bucket = ministack.make_bucket(endpoint, "bench")
        settings = StorageSettings(endpoint=endpoint)
        store = open_store(f"{bucket}/split", settings)
        write_split(store, flat_tokens(folder, shards))
        measure(store, through_obstore(bucket.removeprefix("s3://"), settings, "split"), mbit, rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mbit", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.folder, options.mbit[0], options.shards, options.rounds)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {options.shards} shards, {options.rounds} rounds")
    for mbit in options.mbit:
        own = [sys.executable, __file__, str(options.folder), "--inside", "--mbit", str(mbit)]
        sizes = ["--shards", str(options.shards), "--rounds", str(options.rounds)]
        subprocess.run(
            ["unshare", "--map-root-user", "--net", "sh", "-c", IN_NAMESPACE, "sh", *own, *sizes], check=True
        )
    print(f"afterwards: {machine()}")


if __name__ == "__main__":
    main()
