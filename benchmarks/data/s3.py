"""Windows from an S3 server beside what its best client can read raw, and the first batch of a fresh process.

Raw: the same tars in ranges of 8 MiB, 8 in flight, through obstore (as `phalanx.objects` does), boto3 and s3fs. Reader:
one epoch, 16 x 2048 a batch, by a new reader in one process, without and with an (empty) cache of the node; and of the
same epoch what lies between the first batches of its second and last block (see `epoch`). Rounds are interleaved,
medians are printed, MB are of the tars.

python benchmarks/data/s3.py ENDPOINT FOLDER [--shards 12] [--rounds 5]
(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set)
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import boto3
import numpy as np
import obstore
import s3fs
from corpus import BATCH, BLOCK_SHARDS, SEQ_LEN, SHARD_TOKENS, flat_tokens, machine, order_of, write_split

from phalanx.objects import ObjectStore, StorageSettings, fsspec_options, open_store
from phalanx.stream import WindowReader, open_split
from phalanx.stream.node_cache import NodeCache
from phalanx.stream.pieces import SplitPieces

RANGE_BYTES, IN_FLIGHT = 8 << 20, 8

FIRST_BATCH = """
import sys, time
import numpy as np
sys.path.insert(0, sys.argv[3])
from corpus import BATCH, order_of
from phalanx.objects import StorageSettings, open_store
from phalanx.stream import WindowReader, open_split
import phalanx.objects.s3, botocore.session
start = time.perf_counter()
store = open_store(sys.argv[1], StorageSettings(endpoint=sys.argv[2]))
opened = time.perf_counter()
split = open_split(store)
reader = WindowReader(store, split, order_of(store, split), True, reads_ahead=True)
reader.read(np.arange(BATCH))
print(time.perf_counter() - start, opened - start, flush=True)
import os
os._exit(0)
"""


def ranges(store: ObjectStore, keys: list[str]) -> list[tuple[str, int, int]]:
    """(key, start, stop) of all bytes of the objects."""
    sizes = {key: store.info(key).num_bytes for key in keys}
    return [
        (key, start, min(start + RANGE_BYTES, size))
        for key, size in sizes.items()
        for start in range(0, size, RANGE_BYTES)
    ]


@dataclass(frozen=True, slots=True)
class Rates:
    """MB/s in wall time, and of a second of this process's CPU time."""

    mb_s: float
    mb_cpu_s: float


def epoch(store: ObjectStore, cache: NodeCache | None) -> Rates | None:
    """All windows of one epoch; gives the rates from the first batch of the second block to that of the last one. In
    between as many blocks were fetched as were handed over: what a run does on and on, without how it begins and how
    it ends. Not from the first block's on: its first batch is read alone and waits for some of its pieces, those of
    other blocks come in a group and wait for all. None where there are fewer than three blocks.
    """
    split = open_split(store)
    count = split.num_tokens // SEQ_LEN // BATCH
    block_tokens, last = BLOCK_SHARDS * SHARD_TOKENS, (split.num_shards - 1) // BLOCK_SHARDS
    marks, marked = [], [-(-number * block_tokens // (SEQ_LEN * BATCH)) for number in (1, last)]
    read = 0
    with WindowReader(store, split, order_of(store, split), True, reads_ahead=True, cache=cache) as reader:
        for _ in reader.batches(np.arange(k * BATCH, (k + 1) * BATCH) for k in range(count)):
            if read in marked:
                marks.append((time.perf_counter(), time.process_time()))
            read += 1
    assert read == count
    if last < 2:
        return None
    moved_mb = (last - 1) * block_tokens * split.dtype.itemsize / 1e6
    wall_s, cpu_s = (stop - start for start, stop in zip(*marks, strict=True))
    return Rates(moved_mb / wall_s, moved_mb / cpu_s)


def read_all(read: Callable[[str, int, int], object], wanted: list[tuple[str, int, int]]) -> None:
    """All ranges, IN_FLIGHT at a time."""
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        for _ in threads.map(lambda each: read(*each), wanted):
            pass


def through_obstore(bucket: str, settings: StorageSettings, folder: str) -> Callable[[str, int, int], object]:
    """A read of bytes [start, stop) of a key below `folder` by the bare client."""
    engine = open_store(f"s3://{bucket}", settings)._engine  # type: ignore[attr-defined]
    return lambda key, start, stop: obstore.get_range(engine, f"{folder}/{key}", start=start, end=stop)


def pieces(store: ObjectStore) -> None:
    """All pieces of the split, fetched and verified as a reader does, and dropped."""
    split = open_split(store)
    order = order_of(store, split)
    source = SplitPieces(store, split, order.index_of)
    wanted = [(shard, piece) for shard in range(split.num_shards) for piece in range(source.cut(shard).num_pieces)]
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        found = threads.map(lambda each: not source.load(*each).damage, wanted)
        assert all(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bucket = f"bench-{uuid.uuid4().hex[:8]}"
    client = boto3.client("s3", endpoint_url=options.endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    settings = StorageSettings(endpoint=options.endpoint)
    url = f"s3://{bucket}/split"
    store = open_store(url, settings)
    write_split(store, flat_tokens(options.folder, options.shards))
    keys = [info.key for info in store.list() if info.key.endswith(".tar")]
    wanted = ranges(store, keys)
    total_mb = sum(stop - start for _, start, stop in wanted) / 1e6
    files = s3fs.S3FileSystem(**fsspec_options(url, settings))

    def all_ranges(read: Callable[[str, int, int], object]) -> Callable[[], object]:
        return lambda: read_all(read, wanted)

    def through_boto3(key: str, start: int, stop: int) -> object:
        return client.get_object(Bucket=bucket, Key=f"split/{key}", Range=f"bytes={start}-{stop - 1}")["Body"].read()

    def through_cache() -> Rates:
        shutil.rmtree(options.folder / "pieces", ignore_errors=True)
        return epoch(open_store(url, settings), NodeCache(options.folder / "pieces", 8 << 30))

    sides: dict[str, Callable[[], object]] = {
        "raw, obstore": all_ranges(through_obstore(bucket, settings, "split")),
        "raw, obstore through phalanx.objects": all_ranges(lambda key, a, b: store.read(key, a, b - a)),
        "raw, boto3": all_ranges(through_boto3),
        "raw, s3fs": all_ranges(lambda key, a, b: files.cat_file(f"{bucket}/split/{key}", start=a, end=b)),
        "reader's pieces, fetched and verified": lambda: pieces(store),
        "reader": lambda: epoch(open_store(url, settings), None),
        "reader, filling a node's cache": through_cache,
    }
    print(f"{machine()}; {total_mb:.0f} MB in {len(wanted)} ranges, {options.rounds} rounds")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, act in sides.items():
            start, cpu = time.perf_counter(), time.process_time()
            found = act()
            if number:
                seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))
            if number and isinstance(found, Rates):
                between = seconds.setdefault(f"{name}, between blocks", [])
                between.append((total_mb / found.mb_s, total_mb / found.mb_cpu_s))
    best = max(
        (name for name in sides if name.startswith("raw")), key=lambda name: -median(s for s, _ in seconds[name])
    )
    for name, measured in seconds.items():
        ratio = median(one[0] / own[0] for one, own in zip(seconds[best], measured, strict=True))
        rate, cpu_s = total_mb / median(s for s, _ in measured), median(c for _, c in measured)
        print(f"{name}: {rate:.0f} MB/s, {cpu_s:.2f} s CPU; this / {best} {ratio:.2f}")
    firsts = []
    for _ in range(options.rounds):
        command = [sys.executable, "-c", FIRST_BATCH, url, options.endpoint, str(Path(__file__).parent)]
        firsts.append(
            [float(part) for part in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
        )
    print(
        f"first batch of a fresh process, after imports: {median(f[0] for f in firsts):.2f} s "
        f"({min(f[0] for f in firsts):.2f} to {max(f[0] for f in firsts):.2f}), "
        f"of which opening the store {median(f[1] for f in firsts):.2f} s"
    )
    print(f"afterwards: {machine()}")


if __name__ == "__main__":
    main()
