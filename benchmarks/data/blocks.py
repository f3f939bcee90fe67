"""What `shuffle_block_shards` gives and costs: how well a block of so many shards mixes corpora of few and of many
shards that lie sorted by source, and what a reader with its usual bound fetches and does for it.

Run: python benchmarks/data/blocks.py FOLDER [--shards 16] [--shard-tokens 16000000] [--blocks 4,8,16] [--batches 200]
It prints one JSON line a row and writes the shards below FOLDER, with the flat file (4 bytes a token in all). "Remote"
is the same files behind a store that counts what is read and maps nothing, without a node's cache.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from corpus import BATCH, SEQ_LEN, SHARD_TOKENS, flat_tokens, machine, write_split
from numpy.typing import NDArray
from shuffle_quality import BATCH as DOCUMENTS
from shuffle_quality import ours, quality

from phalanx.objects import ObjectStore, open_store
from phalanx.objects.base import ScopedStore
from phalanx.stream import Order, ShardIndices, WindowReader, open_split

MIXED = ((16, 24_576), (64, 8192), (2048, 512))  # shards, documents of each


class Counting(ScopedStore):
    """A split whose objects are no files; it counts the bytes of tars that are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_store(f"file://{folder.parent}"), folder.name)
        self.num_bytes, self._lock = 0, threading.Lock()

    def local_path(self, key: str) -> None:
        return None

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(key, offset, length)
        with self._lock:
            self.num_bytes += len(data) if key.endswith(".tar") else 0
        return data


def mixing(blocks: list[int]) -> Iterator[dict[str, object]]:
    """How unevenly eight sources that lie in a row come, by shards and block; 1: as by chance alone."""
    for shards, documents in MIXED:
        for block in (each for each in (*blocks, 64) if each <= shards):
            found = quality(ours(shards, documents, 7, 1, block), documents)
            yield {"shards": shards, "block": block, "batch_documents": DOCUMENTS, "mix": round(found.mix, 2)}


def reader_of(store: ObjectStore, block: int, *, reads_ahead: bool) -> WindowReader:
    """Reads as a rank does, 256 MiB at most."""
    split = open_split(store)
    indices = ShardIndices(store, split, 2 * block + 2)
    order = Order(split, 0, SEQ_LEN, block, indices, indices.many)
    return WindowReader(store, split, order, True, reads_ahead=reads_ahead)


def batches(first: int, count: int) -> Iterator[NDArray[np.int64]]:
    """Positions of batches that follow each other."""
    return (np.arange(number * BATCH, (number + 1) * BATCH) for number in range(first, first + count))


def taken(reader: WindowReader, first: int, count: int) -> tuple[float, float]:
    """Seconds and processor seconds for `count` batches."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in reader.batches(batches(first, count)):
        pass
    return time.perf_counter() - begin, time.process_time() - cpu


def reading(folder: Path, blocks: list[int], count: int) -> Iterator[dict[str, object]]:
    """By block: MB that the first batch needs, MB fetched and processor milliseconds a batch inside a block."""
    for block in blocks:
        row: dict[str, object] = {"block": block}
        away = Counting(folder)
        with reader_of(away, block, reads_ahead=False) as reader:
            taken(reader, 0, 1)
            row["first_batch_mb"] = round(away.num_bytes / 1e6, 1)
            taken(reader, 1, count)  # the block has come by now, as far as it fits
            before = away.num_bytes
            _, cpu = taken(reader, count + 1, count)
            row["remote_mb_a_batch_then"] = round((away.num_bytes - before) / 1e6 / count, 2)
            row["remote_cpu_ms_a_batch"] = round(cpu / count * 1e3, 2)
        with reader_of(open_store(f"file://{folder}"), block, reads_ahead=True) as reader:
            taken(reader, 0, count)
            wall, cpu = taken(reader, count, count)
            row |= {
                "local_ms_a_batch": round(wall / count * 1e3, 2),
                "local_cpu_ms_a_batch": round(cpu / count * 1e3, 2),
            }
        yield row


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS)
    parser.add_argument("--blocks", default="4,8,16")
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    blocks, size = [int(each) for each in options.blocks.split(",")], options.shard_tokens
    folder = options.folder / f"split-{options.shards}"
    print(machine())
    for row in mixing(blocks):
        print(json.dumps(row), flush=True)
    write_split(open_store(f"file://{folder}"), flat_tokens(options.folder, options.shards, size), size)
    for row in reading(folder, blocks, options.batches):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
