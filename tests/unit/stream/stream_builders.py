"""Builds real splits for the stream's tests: shards, indices and a manifest in an object store, from plain token
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.core.digest import canonical_json, sha256
from phalanx.objects import ObjectStore
from phalanx.stream.manifest import INLINE_SHARDS, ShardEntry, ids_key, index_key, manifest_objects, tar_key
from phalanx.stream.shards import ShardBuilder, token_dtype

Shards = Sequence[Sequence[np.ndarray]]


def numbered_documents(lengths: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Documents of these lengths, shard by shard, in which every token of the split is another number."""
    first, shards = 0, []
    for shard in lengths:
        documents = []
        for length in shard:
            documents.append(np.arange(first, first + length))
            first += length
        shards.append(documents)
    return shards


def write_split(
    store: ObjectStore,
    shards: Shards,
    *,
    vocab_size: int = 1 << 17,
    member_bytes: int = 256,
    is_held_out: bool = False,
    inline_shards: int = INLINE_SHARDS,
) -> None:
    """Writes a whole split folder into `store`. inline_shards: how many a manifest without a table has at most."""
    entries = []
    for number, documents in enumerate(shards):
        builder = ShardBuilder(f"t-{number:08d}", token_dtype(vocab_size), member_bytes)
        for k, tokens in enumerate(documents):
            builder.add(f"{number}/v1.{k}.txt", tokens)
        built = builder.finish()
        index, ids = built.index.encode(), canonical_json({"ids": list(built.document_ids)})
        store.create(tar_key(built.name), built.tar)
        store.create(index_key(built.name), index)
        store.create(ids_key(built.name), ids)
        entries.append(ShardEntry.of(built, index, ids))
    objects = manifest_objects(
        entries,
        name="train",
        is_held_out=is_held_out,
        tokenizer_digest=sha256(b"a tokenizer"),
        vocab_size=vocab_size,
        eos_id=0,
        recipe={"made_by": "a test"},
        inline_shards=inline_shards,
    )
    for key, data in objects:
        store.create(key, data)
