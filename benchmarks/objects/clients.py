"""Reads of 8 MiB ranges and puts of 16 MiB through obstore, s3fs and boto3: MB/s, best of 3, 8 in flight.

python benchmarks/objects/clients.py ENDPOINT     (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set)
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import boto3
import s3fs

from phalanx.objects import StorageSettings, fsspec_options, open_store

RANGE_BYTES, NUM_RANGES, PUT_BYTES, NUM_PUTS, IN_FLIGHT = 8 * 2**20, 32, 16 * 2**20, 8, 8


def rate(total_bytes: int, act: Callable[[int], object], count: int) -> tuple[float, float]:
    """Best MB/s of three rounds, and the process's CPU seconds in that round."""
    best = (0.0, 0.0)
    for turn in range(3):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(act, range(turn * count, (turn + 1) * count)))
        seconds = time.perf_counter() - start_s
        best = max(best, (total_bytes / seconds / 1e6, time.process_time() - start_cpu_s))
    return best


def main() -> None:
    endpoint, bucket = sys.argv[1], f"bench-{uuid.uuid4().hex[:8]}"
    settings = StorageSettings(endpoint=endpoint)
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    store = open_store(f"s3://{bucket}", settings)
    files = s3fs.S3FileSystem(**fsspec_options(f"s3://{bucket}", settings))
    store.create("big", os.urandom(RANGE_BYTES * NUM_RANGES // 4))
    data = os.urandom(PUT_BYTES)

    def range_of(index: int) -> tuple[int, int]:
        start = index % (NUM_RANGES // 4) * RANGE_BYTES
        return start, start + RANGE_BYTES

    def boto3_read(index: int) -> object:
        start, stop = range_of(index)
        return client.get_object(Bucket=bucket, Key="big", Range=f"bytes={start}-{stop - 1}")["Body"].read()

    reads: dict[str, Callable[[int], object]] = {
        "obstore (phalanx.objects)": lambda index: store.read("big", range_of(index)[0], RANGE_BYTES),
        "s3fs": lambda index: files.cat_file(f"{bucket}/big", start=range_of(index)[0], end=range_of(index)[1]),
        "boto3": boto3_read,
    }
    puts: dict[str, Callable[[int], object]] = {
        "obstore (phalanx.objects)": lambda index: store.create(f"obstore/{index}", data),
        "s3fs": lambda index: files.pipe_file(f"{bucket}/s3fs/{index}", data),
        "boto3": lambda index: client.put_object(Bucket=bucket, Key=f"boto3/{index}", Body=data),
    }
    for title, calls, total, count in (
        ("8 MiB ranges", reads, RANGE_BYTES * NUM_RANGES, NUM_RANGES),
        ("16 MiB puts", puts, PUT_BYTES * NUM_PUTS, NUM_PUTS),
    ):
        for name, act in calls.items():
            megabytes_per_s, cpu_s = rate(total, act, count)
            print(f"{title}: {name}: {megabytes_per_s:.0f} MB/s, {cpu_s:.2f} s CPU")


if __name__ == "__main__":
    main()
