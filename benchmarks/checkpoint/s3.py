"""A checkpoint to an S3 server beside raw multipart uploads of the same bytes by the best client, interleaved, medians.

Ours is capture, upload and part object, with all hashing. Raw: objects of 256 MiB in parts of 16 MiB, 8 in flight,
through obstore, without digests and over no condition. boto3 and s3fs do the same once, in the round before those that
count, to show which client is the best.

OMP_NUM_THREADS=1 python benchmarks/checkpoint/s3.py ENDPOINT [--gib 0.5 2.2] [--ranks 1 2] [--rounds 3] [--json FILE]
(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set). All four in about 6 minutes against a server that takes 150 MB/s.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import boto3
import obstore
import s3fs
import torch
from boto3.s3.transfer import TransferConfig
from obstore.store import S3Store

from phalanx.core.box import HeldTensor, whole
from phalanx.objects import StorageSettings, fsspec_options, open_store
from phalanx.snapshot.grouping import OBJECT_BYTES
from phalanx.snapshot.writer import Writer

SHAPE, PART_BYTES, IN_FLIGHT, DEADLINE_S = (2048, 2048), 16 << 20, 8, 1800.0
Figures = dict[str, float]


def raw_clients(endpoint: str, bucket: str) -> dict[str, Callable[[str, memoryview], object]]:
    """What uploads one object in parts, by client."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=IN_FLIGHT)
    files = s3fs.S3FileSystem(**fsspec_options(f"s3://{bucket}", StorageSettings(endpoint=endpoint)))
    engine = S3Store(
        bucket,
        config={"endpoint": endpoint, "region": "us-east-1", "virtual_hosted_style_request": False},
        client_options={"allow_http": True, "timeout": timedelta(seconds=DEADLINE_S)},
    )
    return {
        "obstore": lambda key, data: obstore.put(
            engine, key, data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=IN_FLIGHT
        ),
        "boto3": lambda key, data: client.upload_fileobj(io.BytesIO(data), bucket, key, Config=transfer),
        "s3fs": lambda key, data: files.pipe_file(
            f"{bucket}/{key}", bytes(data), chunksize=PART_BYTES, max_concurrency=IN_FLIGHT
        ),
    }


def one_rank(setting: tuple[str, str, float, int, int], rank: int, meeting: Any, answers: Any) -> None:
    """All rounds of one rank; answers with its medians."""
    torch.set_num_threads(1)
    endpoint, bucket, gib, world_size, rounds = setting
    count = max(1, int(gib * 2**30) // (4 * SHAPE[0] * SHAPE[1]) // world_size)
    tensors = [torch.randn(SHAPE) for _ in range(count)]
    held = [HeldTensor(f"model.{rank}.{n}", SHAPE, whole(SHAPE), each) for n, each in enumerate(tensors)]
    store = open_store(f"s3://{bucket}/job", StorageSettings(endpoint=endpoint), DEADLINE_S)
    writer = Writer(store, rank, world_size, deadline_s=DEADLINE_S)
    writer.prepare(held).result(DEADLINE_S)
    flat = torch.cat([each.reshape(-1) for each in tensors]).view(torch.uint8).numpy().data
    pieces = [flat[start : start + OBJECT_BYTES] for start in range(0, len(flat), OBJECT_BYTES)]

    def raw(name: str, put: Callable[[str, memoryview], object]) -> None:
        for index, piece in enumerate(pieces):
            put(f"job/raw/{rank}/{name}/{index}", piece)

    acts = {name: partial(raw, name, put) for name, put in raw_clients(endpoint, bucket).items()}
    found: list[Figures] = []
    for number in range(rounds + 1):
        acts["ours"] = partial(save, writer, number + 1, held)
        names = list(acts) if number == 0 else ["obstore", "ours"] if number % 2 else ["ours", "obstore"]
        figures = {}
        for name in names:
            processor = time.process_time()
            figures[f"{name}_s"] = together(meeting, acts[name])
            figures[f"{name}_processor_s"] = time.process_time() - processor
            clear(store)
        found.append(figures)
    medians = {name: median(each[name] for each in found[1:]) for name in found[1]}
    answers.put({"gib": len(flat) * world_size / 2**30, **found[0], **medians})


def save(writer: Writer, step: int, held: list[HeldTensor]) -> None:
    """A checkpoint of this rank, up to its part object."""
    writer.save(1, step, held).wait(DEADLINE_S)


def together(meeting: Any, act: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    meeting.wait(DEADLINE_S)
    start = time.perf_counter()
    act()
    meeting.wait(DEADLINE_S)
    return time.perf_counter() - start


def clear(store: Any) -> None:
    """Removes all objects, as the server may hold them in memory."""
    for info in list(store.list()):
        store.delete(info.key)


def measured(setting: tuple[str, str, float, int, int]) -> Figures:
    """Runs the ranks in processes of their own; the slowest rank's figures."""
    context = multiprocessing.get_context("spawn")
    answers, meeting = context.Queue(), context.Barrier(setting[3])
    ranks = [context.Process(target=one_rank, args=(setting, rank, meeting, answers)) for rank in range(setting[3])]
    for each in ranks:
        each.start()
    found = [answers.get(timeout=DEADLINE_S) for _ in ranks]
    for each in ranks:
        each.join()
    worst = {name: max(each[name] for each in found) for name in found[0]}
    raw = [worst[f"{name}_s"] for name in ("obstore", "boto3", "s3fs")]
    return {**worst, "rate of ours / of the best raw (>= 0.85)": min(raw) / worst["ours_s"]}


def table(columns: list[dict[str, Any]]) -> str:
    """What was found, a column for each size and number of ranks."""
    heads = [f"{each['gib']:.1f} GiB, {each['ranks']} rank(s)" for each in columns]
    lines = [f"| seconds, slowest rank | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    names = [name for name in columns[0] if name not in ("gib", "ranks")]
    return "\n".join(lines + [f"| {name} | {' | '.join(f'{each[name]:.2f}' for each in columns)} |" for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--gib", type=float, nargs="+", default=[0.5, 2.2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="measured ones; one more goes before them")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    bucket = f"bench-{uuid.uuid4().hex[:8]}"
    boto3.client("s3", endpoint_url=options.endpoint, region_name="us-east-1").create_bucket(Bucket=bucket)
    columns: list[dict[str, Any]] = []
    for gib in options.gib:
        for world_size in options.ranks:
            load, began = os.getloadavg()[0], time.perf_counter()
            found = measured((options.endpoint, bucket, gib, world_size, options.rounds))
            columns.append({"ranks": world_size, **found})
            took_s = time.perf_counter() - began
            print(f"{gib:g} GiB, {world_size} rank(s): {took_s:.0f} s, load before {load:.1f}")
            print(
                f"  rate of ours / of the best raw: {columns[-1]['rate of ours / of the best raw (>= 0.85)']:.2f}",
                flush=True,
            )
    print(table(columns))
    if options.json:
        options.json.write_text(json.dumps(columns, indent=1))


if __name__ == "__main__":
    main()
