"""Writes one split shard by shard, from documents that are tokens already.

A shard's three objects are created in the order tar, index, ids; the ids object ends the shard and names the digests of
the other two. Whoever starts over cuts the same shards and passes over those that are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import canonical_json, sha256, xxh3
from phalanx.data.prepare.report import SplitSummary
from phalanx.data.prepare.same import create_same
from phalanx.data.prepare.tokenizer import TokenizerFacts
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import ShardEntry, ids_key, index_key, manifest_objects, tar_key
from phalanx.stream.shards import ShardBuilder

IDS_FORMAT = "phalanx.ids/1"


class SplitWriter:
    """Takes the documents of one split in order. num_tokens: of what was added so far."""

    def __init__(self, store: ObjectStore, name: str, tokenizer: TokenizerFacts, shard_tokens: int) -> None:
        self._store, self._name, self._tokenizer, self._shard_tokens = store, name, tokenizer, shard_tokens
        self._entries: list[ShardEntry] = []
        self._builder: ShardBuilder | None = None
        self.num_tokens = 0

    def add(self, document_id: str, tokens: NDArray[np.unsignedinteger]) -> None:
        """Takes the next document, tokens [length]; writes a shard when one is full."""
        if self._builder is None:
            self._builder = ShardBuilder(f"{self._name}-{len(self._entries):08d}", self._tokenizer.dtype)
        self._builder.add(
            document_id, tokens.copy()
        )  # a view would hold its whole chunk, for as long as a member waits
        self.num_tokens += len(tokens)
        if self._builder.num_tokens >= self._shard_tokens:
            self._close_shard(self._builder)

    def finish(self) -> None:
        """Writes the last shard."""
        if self._builder is not None:
            self._close_shard(self._builder)

    @property
    def is_empty(self) -> bool:
        """Whether no shard was written; meaningful after `finish`."""
        return not self._entries

    def manifest(
        self, *, is_held_out: bool, recipe: dict[str, Any]
    ) -> tuple[SplitSummary, tuple[tuple[str, bytes], ...]]:
        """What was written, and the objects that make the split exist: (key, bytes) in the order of creation."""
        objects = manifest_objects(
            self._entries,
            name=self._name,
            is_held_out=is_held_out,
            tokenizer_digest=self._tokenizer.digest,
            vocab_size=self._tokenizer.vocab_size,
            eos_id=self._tokenizer.eos_id,
            recipe=recipe,
        )
        summary = SplitSummary(
            self._name,
            sha256(objects[-1][1]),
            len(self._entries),
            sum(entry.num_documents for entry in self._entries),
            sum(entry.num_tokens for entry in self._entries),
            sum(entry.num_bytes for entry in self._entries),
        )
        return summary, objects

    def _close_shard(self, builder: ShardBuilder) -> None:
        built, self._builder = builder.finish(), None
        index = built.index.encode()
        ids = canonical_json(
            {
                "format": IDS_FORMAT,
                "shard": built.name,
                "ids": list(built.document_ids),
                "tokens": built.num_tokens,
                "tar_bytes": len(built.tar),
                "tar_digest": xxh3(built.tar),
                "index_digest": xxh3(index),
            }
        )
        if not self._is_written(built.name, len(built.tar), len(index), ids):
            create_same(self._store, tar_key(built.name), built.tar)
            create_same(self._store, index_key(built.name), index)
            create_same(self._store, ids_key(built.name), ids)
        self._entries.append(ShardEntry.of(built, index, ids))

    def _is_written(self, name: str, tar_bytes: int, index_bytes: int, ids: bytes) -> bool:
        """Whether an earlier start finished this very shard: the ids name the digests of the other two objects."""
        try:
            return (
                self._store.read(ids_key(name)) == ids
                and self._store.info(tar_key(name)).num_bytes == tar_bytes
                and self._store.info(index_key(name)).num_bytes == index_bytes
            )
        except ObjectMissing:
            return False
