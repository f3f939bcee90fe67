"""Writes one split shard by shard, so that a preparation killed at any moment goes on where it stood and ends with the
same bytes.

A shard's three objects are created in the order tar, index, ids; the ids object ends the shard and names the digests of
the other two and of the documents that went in. A new start finds the finished shards by it: their documents are
compared by digest, not tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

from phalanx.core.digest import canonical_json, sha256, xxh3
from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.report import SplitSummary
from phalanx.data.prepare.rules import LONG_DOCUMENT_TOKENS
from phalanx.data.prepare.tokenizer import TextTokenizer
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore
from phalanx.stream.manifest import ShardEntry, ids_key, index_key, manifest_objects, tar_key
from phalanx.stream.shards import BuiltShard, ShardBuilder

IDS_FORMAT = "phalanx.ids/1"
BATCH_DOCUMENTS = 1024
BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """A document that goes into the dataset. text: UTF-8; content_digest: its SHA-256, 32 bytes."""

    id: str
    text: bytes
    content_digest: bytes


class _DocumentsDigest:
    """SHA-256 over the ids and contents of documents in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        name = document.id.encode()
        self._hash.update(struct.pack("<Q", len(name)) + name + document.content_digest)

    def value(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


class SplitWriter:
    """Takes the documents of one split in order. num_tokens, num_long_documents: of what is written so far."""

    def __init__(self, store: ObjectStore, name: str, tokenizer: TextTokenizer, shard_tokens: int) -> None:
        self._store, self._name, self._tokenizer, self._shard_tokens = store, name, tokenizer, shard_tokens
        self._entries: list[ShardEntry] = []
        self._pending: list[Document] = []
        self._pending_bytes = 0
        self.num_tokens = 0
        self.num_long_documents = 0
        self._builder: ShardBuilder | None = None
        self._digest = _DocumentsDigest()
        self._num_long = 0
        self._finished: dict[str, Any] | None = None
        self._finished_left = 0
        self._find_finished()

    def add(self, document: Document) -> None:
        """Takes the next document; writes a shard when one is full."""
        if self._finished is not None:
            self._pass_over(document)
            return
        self._pending.append(document)
        self._pending_bytes += len(document.text)
        if len(self._pending) >= BATCH_DOCUMENTS or self._pending_bytes >= BATCH_BYTES:
            self._tokenize_pending()

    def finish(self) -> None:
        """Writes the last shard."""
        if self._finished is not None:
            raise self._differs(ids_key(self._shard_name()))
        self._tokenize_pending()
        if self._builder is not None:
            self._close_shard()

    @property
    def is_empty(self) -> bool:
        """Whether no shard was written; meaningful after `finish`."""
        return not self._entries

    def write_manifest(self, *, is_held_out: bool, recipe: dict[str, Any]) -> SplitSummary:
        """Writes the manifest, which makes the split exist."""
        objects = manifest_objects(
            self._entries,
            name=self._name,
            is_held_out=is_held_out,
            tokenizer_digest=self._tokenizer.digest,
            vocab_size=self._tokenizer.vocab_size,
            eos_id=self._tokenizer.eos_id,
            recipe=recipe,
        )
        for key, data in objects:
            create_same(self._store, key, data)
        return SplitSummary(
            self._name,
            sha256(objects[-1][1]),
            len(self._entries),
            sum(entry.num_documents for entry in self._entries),
            sum(entry.num_tokens for entry in self._entries),
            sum(entry.num_bytes for entry in self._entries),
        )

    def _shard_name(self) -> str:
        return f"{self._name}-{len(self._entries):08d}"

    def _find_finished(self) -> None:
        """Looks whether the next shard was finished by an earlier run."""
        self._finished = None
        name = self._shard_name()
        try:
            record = json.loads(self._store.read(ids_key(name)))
            self._store.info(index_key(name))
            if self._store.info(tar_key(name)).num_bytes != record["tar_bytes"]:
                return
        except ObjectMissing:
            return
        except (ValueError, KeyError, TypeError):
            raise self._differs(ids_key(name)) from None
        self._finished, self._finished_left = record, len(record["ids"])

    def _pass_over(self, document: Document) -> None:
        """Takes a document that a finished shard already holds."""
        assert self._finished is not None
        self._digest.add(document)
        self._finished_left -= 1
        if self._finished_left:
            return
        if self._digest.value() != self._finished["documents_digest"]:
            raise self._differs(ids_key(self._shard_name()))
        self._append(self._finished)
        self._find_finished()

    def _tokenize_pending(self) -> None:
        documents, self._pending, self._pending_bytes = self._pending, [], 0
        for document, tokens in zip(documents, self._tokenizer.encode([d.text for d in documents]), strict=True):
            if self._builder is None:
                self._builder = ShardBuilder(self._shard_name(), self._tokenizer.dtype)
            self._builder.add(document.id, tokens)
            self._digest.add(document)
            self._num_long += len(tokens) > LONG_DOCUMENT_TOKENS
            if self._builder.num_tokens >= self._shard_tokens:
                self._close_shard()

    def _close_shard(self) -> None:
        assert self._builder is not None
        built, self._builder = self._builder.finish(), None
        index = built.index.encode()
        record = self._record(built, index)
        create_same(self._store, tar_key(built.name), built.tar)
        create_same(self._store, index_key(built.name), index)
        create_same(self._store, ids_key(built.name), canonical_json(record))
        self._append(record)

    def _record(self, built: BuiltShard, index: bytes) -> dict[str, Any]:
        return {
            "format": IDS_FORMAT,
            "shard": built.name,
            "ids": list(built.document_ids),
            "documents_digest": self._digest.value(),
            "tokens": built.num_tokens,
            "long_documents": self._num_long,
            "tar_bytes": len(built.tar),
            "tar_digest": xxh3(built.tar),
            "index_digest": xxh3(index),
        }

    def _append(self, record: dict[str, Any]) -> None:
        """Counts a finished shard in and starts the next."""
        ids_digest = xxh3(canonical_json(record))
        entry = ShardEntry(
            record["shard"],
            record["tar_bytes"],
            len(record["ids"]),
            record["tokens"],
            record["tar_digest"],
            record["index_digest"],
            ids_digest,
        )
        self._entries.append(entry)
        self.num_tokens += entry.num_tokens
        self.num_long_documents += record["long_documents"]
        self._digest, self._num_long = _DocumentsDigest(), 0

    def _differs(self, key: str) -> PhalanxError:
        return differs(self._store, key)


def create_same(store: ObjectStore, key: str, data: bytes) -> None:
    """Creates an object, or accepts one that already holds these bytes; raises PhalanxError where it holds others."""
    try:
        store.create(key, data)
    except ObjectExists:
        if store.read(key) != data:
            raise differs(store, key) from None


def differs(store: ObjectStore, key: str) -> PhalanxError:
    """The error for an output folder that holds what another input or other settings made."""
    return PhalanxError(
        f"{store.url}/{key}",
        expected="what this input and these settings give",
        remedy="it holds another dataset, or the input has changed since: name an empty --out folder",
    )
