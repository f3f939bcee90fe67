"""Finds windows in the order of a synthetic split of many shards: how long the first takes in a fresh process, and the
later ones. The indices are made up beforehand or counted apart, so the figures hold no fetch.

Run: python benchmarks/data/order.py [--shards 1000000] [--window 2000000000] [--block 4] [--rounds 7]; prints one
JSON line a round, then the medians. On a machine that does other work put `chrt -f 10` before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
import numpy as np
from phalanx.objects import open_store
from phalanx.stream.manifest import open_split
from phalanx.stream.order import Order
from phalanx.stream.shards import ShardIndex, decode_index

window, block, fetch_s = int(sys.argv[2]), int(sys.argv[3]), [0.0, 0]

def index_of(shard):
    begin = time.perf_counter(), time.process_time()
    documents, tokens = int(split.shard_documents[shard]), int(split.shard_tokens[shard])
    ends = np.sort(np.random.default_rng(shard).choice(tokens - 1, documents - 1, replace=False)) + 1
    lengths = np.diff(ends, prepend=0, append=tokens).astype(np.uint32)
    per_member = documents // 20
    members = np.full(20, per_member, np.uint32)
    members[-1] += documents - 20 * per_member
    index = ShardIndex(lengths, members, np.arange(20, dtype=np.uint64), np.arange(20, dtype=np.uint64))
    fetch_s[0] += time.perf_counter() - begin[0]
    fetch_s[1] += time.process_time() - begin[1]
    return index

def timed(work, repeat=1):
    fetch_s[:] = 0.0, 0.0
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeat):
        work()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return round((wall - fetch_s[0]) / repeat * 1e3, 4), round((cpu - fetch_s[1]) / repeat * 1e3, 4)

split = open_split(open_store(sys.argv[1]))
index_of(0)  # imports of numpy's random module
order = None

def first():
    global order
    order = Order(split, 7, 2048, block, index_of)
    order.window(window)

told = {"first_window": timed(first)}
_, number, start = order._block_at(window * 2048)
last = (start + order._block(0, number).num_tokens) // 2048
inside = iter(np.random.default_rng(0).integers(window, last - 1, 2000).tolist())
told["window_in_an_open_block"] = timed(lambda: order.window(next(inside)), 2000)
batch = np.arange(window, window + 256) * 2048
told["batch_of_256_windows_at_once"] = timed(lambda: order.between_many(batch, batch + 2049), 50)
told["first_window_of_the_next_block"] = timed(lambda: order.window(last + 1))
shard = int(order.window(window).shard[0])
told["document_to_windows_in_an_open_block"] = timed(lambda: order.positions_of(0, shard, 5), 50)
later = order.epoch_tokens // 2048 + window
told["first_window_of_another_epoch"] = timed(lambda: order.window(later))
told = {name: {"wall_ms": wall, "cpu_ms": cpu} for name, (wall, cpu) in told.items()}
told["bytes_kept_an_epoch"] = order._epoch(0).shards.nbytes + order._epoch(0).starts.nbytes
print(json.dumps(told))
"""


def main() -> None:
    """Writes the manifest, asks fresh processes one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=2_000_000_000)
    parser.add_argument("--block", type=int, default=4, help="shards of a block")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/split"
        manifest = Path(__file__).with_name("manifest.py")
        subprocess.run(
            [sys.executable, str(manifest), "--shards", str(options.shards), "--url", url, "--rounds", "0"], check=True
        )
        for _ in range(options.rounds):
            command = [sys.executable, "-c", CHILD, url, str(options.window), str(options.block)]
            rounds.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            print(json.dumps(rounds[-1] | {"load": round(os.getloadavg()[0], 1)}), flush=True)
    medians = {
        name: {kind: round(statistics.median(each[name][kind] for each in rounds), 3) for kind in ("wall_ms", "cpu_ms")}
        for name in rounds[0]
        if isinstance(rounds[0][name], dict)
    }
    print(
        json.dumps({"medians": medians, "fastest_first_window_ms": min(r["first_window"]["wall_ms"] for r in rounds)})
    )


if __name__ == "__main__":
    main()
