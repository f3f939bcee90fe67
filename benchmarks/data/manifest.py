"""Opens the manifest of a synthetic split of many shards: how long it takes in a fresh process, and what memory the
processes of one node take for it together.

Run: python benchmarks/data/manifest.py [--shards 1000000] [--processes 8] [--url file:///tmp/large]; prints one JSON
line a figure. A split that lies at the URL already is used as it is. S3 is reached as AWS_ENDPOINT_URL and its kin say.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from phalanx.objects import ObjectExists, open_store
from phalanx.stream.manifest import manifest_objects
from phalanx.stream.shard_table import NumberedNames, ShardTable

DOCUMENTS_A_SHARD, TOKENS_A_SHARD = 10_000, 10_000_000
CHILD = """
import json, re, sys, time
from pathlib import Path
from phalanx.objects import open_store
from phalanx.stream.manifest import open_split

def memory():
    text = Path("/proc/self/smaps_rollup").read_text()
    return {name.lower(): int(re.search(rf"^{name}: +([0-9]+) kB", text, re.M)[1]) * 1024 for name in ("Pss", "Rss")}

store = open_store(sys.argv[1])
before = memory()
begin, cpu = time.perf_counter(), time.process_time()
split = open_split(store, node_folder=Path(sys.argv[2]))
wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
told = {"wall_s": wall_s, "cpu_s": cpu_s, "shards": split.num_shards, "documents": split.num_documents}
print(json.dumps(told), flush=True)
sys.stdin.readline()
print(json.dumps({"before": before, "after": memory()}), flush=True)
sys.stdin.readline()
"""


def synthetic(num_shards: int) -> ShardTable:
    """Shards of about 10,000 documents and 10 million tokens each."""
    draw = np.random.default_rng(1)
    documents = draw.poisson(DOCUMENTS_A_SHARD, num_shards).astype(np.int64)
    documents[-1] += DOCUMENTS_A_SHARD * num_shards - documents.sum()
    tokens = draw.integers(TOKENS_A_SHARD, TOKENS_A_SHARD + 2000, num_shards)
    digests = [draw.integers(0, 256, (num_shards, 16), np.uint8) for _ in range(3)]
    return ShardTable(NumberedNames("train-", 8, num_shards), tokens * 2 + 500_000, documents, tokens, *digests)


def write(url: str, num_shards: int) -> None:
    """Writes the manifest, without the shards, unless it is there."""
    objects = manifest_objects(
        synthetic(num_shards),
        name="train",
        is_held_out=False,
        tokenizer_digest="sha256:" + "0" * 64,
        vocab_size=50_000,
        eos_id=0,
        recipe={"made_by": "a benchmark"},
    )
    store = open_store(url)
    for key, data in objects:
        with contextlib.suppress(ObjectExists):
            store.create(key, data)
        print(json.dumps({"object": key, "bytes": len(data)}))


class Opener:
    """A fresh process that opens the manifest and holds it."""

    def __init__(self, url: str, node_folder: Path) -> None:
        command = [sys.executable, "-c", CHILD, url, str(node_folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, object]:
        """The next line that it prints."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def go_on(self) -> None:
        """Lets it print its next line, or end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Waits for its end."""
        self.go_on()
        self._process.wait(60)


def measure(url: str, num_processes: int, folder: Path) -> dict[str, object]:
    """Opens it in so many processes at once, with nothing cached on the node; figures of all of them."""
    shutil.rmtree(folder, ignore_errors=True)
    openers = [Opener(url, folder / "objects") for _ in range(num_processes)]
    opened = [opener.answer() for opener in openers]
    for opener in openers:
        opener.go_on()
    memory = [opener.answer() for opener in openers]
    for opener in openers:
        opener.end()
    return {
        "processes": num_processes,
        "slowest_open_s": round(max(each["wall_s"] for each in opened), 3),
        "median_open_s": round(statistics.median(each["wall_s"] for each in opened), 3),
        "median_open_cpu_s": round(statistics.median(each["cpu_s"] for each in opened), 3),
        "pss_sum_mb": round(sum(each["after"]["pss"] for each in memory) / 1e6, 1),
        "pss_sum_before_mb": round(sum(each["before"]["pss"] for each in memory) / 1e6, 1),
        "largest_rss_mb": round(max(each["after"]["rss"] for each in memory) / 1e6, 1),
        "shards": opened[0]["shards"],
        "documents": opened[0]["documents"],
    }


def main() -> None:
    """Writes the split, then measures with one process and with several."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        url = options.url or f"file://{folder}/split"
        write(url, options.shards)
        for _ in range(options.rounds):
            for num_processes in (1, options.processes):
                figures = measure(url, num_processes, folder / "node") | {"load": round(os.getloadavg()[0], 1)}
                print(json.dumps(figures), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
