"""The corpus that the benchmarks read: random tokens in documents of log-normal lengths (mean about 700), as a split
and as one flat file. Speed does not depend on what the tokens say.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import canonical_json, sha256
from phalanx.objects import ObjectStore, open_store
from phalanx.stream import Order, ShardIndices, Split
from phalanx.stream.manifest import ShardEntry, encode_manifest, ids_key, index_key, tar_key
from phalanx.stream.shards import ShardBuilder, token_dtype

VOCAB_SIZE, SHARD_TOKENS, BLOCK_SHARDS = 50_000, 16_000_000, 4
SEQ_LEN, BATCH = 2048, 16


def flat_tokens(folder: Path, num_shards: int, shard_tokens: int = SHARD_TOKENS) -> NDArray[np.uint16]:
    """All tokens as a mapped file of uint16, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tokens-{num_shards}.bin"
    if not path.exists():
        drawn = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_shards * shard_tokens, dtype=np.uint16)
        drawn.tofile(path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return np.memmap(path, dtype=np.uint16, mode="r")


def document_lengths(num_tokens: int) -> NDArray[np.int64]:
    """Lengths that sum up to `num_tokens`."""
    lengths = np.random.default_rng(1).lognormal(6.0, 1.1, num_tokens // 300).clip(20, 60_000).astype(np.int64)
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, num_tokens))
    assert count < len(ends)
    return np.append(lengths[:count], num_tokens - (ends[count - 1] if count else 0)).astype(np.int64)


def write_split(
    store: ObjectStore,
    tokens: NDArray[np.uint16],
    shard_tokens: int = SHARD_TOKENS,
    vocab_size: int = VOCAB_SIZE,
    *,
    is_held_out: bool = False,
) -> None:
    """The split; nothing where it is there already."""
    if any(True for _ in store.list("manifest.json")):
        return
    entries = []
    for number, start in enumerate(range(0, len(tokens), shard_tokens)):
        shard, builder, at = (
            tokens[start : start + shard_tokens],
            ShardBuilder(f"train-{number:08d}", token_dtype(vocab_size)),
            0,
        )
        for document, length in enumerate(document_lengths(len(shard)).tolist()):
            if length:
                builder.add(f"{number}/{document}", shard[at : at + length])
            at += length
        built = builder.finish()
        index, ids = built.index.encode(), canonical_json({"ids": list(built.document_ids)})
        for key, data in ((tar_key(built.name), built.tar), (index_key(built.name), index), (ids_key(built.name), ids)):
            store.create(key, data)
        entries.append(ShardEntry.of(built, index, ids))
    manifest = encode_manifest(
        entries,
        name="held_out" if is_held_out else "train",
        is_held_out=is_held_out,
        tokenizer_digest=sha256(b""),
        vocab_size=vocab_size,
        eos_id=0,
        recipe={},
    )
    store.create("manifest.json", manifest)


def order_of(store: ObjectStore, split: Split) -> Order:
    """The order of a job with the usual block."""
    indices = ShardIndices(store, split, 2 * BLOCK_SHARDS + 2)
    return Order(split, 0, SEQ_LEN, BLOCK_SHARDS, indices, indices.many)


def machine() -> str:
    """What a results page must say of where it was run."""
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"{os.cpu_count()} cores, load {load}, Python {sys.version.split()[0]}, numpy {np.__version__}"


if __name__ == "__main__":
    root, count = Path(sys.argv[1]), int(sys.argv[2])
    write_split(open_store(f"file://{root}/split-{count}"), flat_tokens(root, count))
