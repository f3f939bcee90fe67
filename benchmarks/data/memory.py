"""Memory of a reading process over 20 epochs: proportional set size after each, which counts mapped pages too. From
local disk, or with `--endpoint` from an S3 server (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set).

python benchmarks/data/memory.py FOLDER [--endpoint URL] [--shards 6] [--epochs 20]
"""

from __future__ import annotations

import argparse
import re
import uuid
from pathlib import Path

import numpy as np
from corpus import BATCH, SEQ_LEN, flat_tokens, machine, order_of, write_split

from phalanx.objects import ObjectStore, StorageSettings, open_store
from phalanx.stream import WindowReader, open_split


def pss_mb() -> float:
    """Proportional set size of this process."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def on_s3(endpoint: str) -> ObjectStore:
    """A folder of a new bucket."""
    import boto3

    bucket = f"bench-{uuid.uuid4().hex[:8]}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=bucket)
    return open_store(f"s3://{bucket}/split", StorageSettings(endpoint=endpoint))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--endpoint")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    local = f"file://{options.folder.absolute()}/split-{options.shards}"
    store = on_s3(options.endpoint) if options.endpoint else open_store(local)
    write_split(store, flat_tokens(options.folder, options.shards))
    split = open_split(store)
    count = split.num_tokens // SEQ_LEN // BATCH
    print(f"{machine()}; {split.num_tokens * 2 / 1e6:.0f} MB an epoch")
    found = []
    with WindowReader(store, split, order_of(store, split), True, reads_ahead=True) as reader:
        for epoch in range(options.epochs):
            for _ in reader.batches(
                np.arange(k * BATCH, (k + 1) * BATCH) for k in range(epoch * count, (epoch + 1) * count)
            ):
                pass
            found.append(pss_mb())
            print(f"epoch {epoch + 1}: {found[-1]:.0f} MB", flush=True)
    low, high = min(found[1:]), max(found[1:])
    print(f"epochs 2 to {options.epochs}: {low:.0f} to {high:.0f} MB, spread {high / low - 1:.1%}")


if __name__ == "__main__":
    main()
