"""Checks every byte of a split: sizes and digests of shards, indices and ids, and that tar and index tell the same
story.

Damage is named as closely as the digests allow: the shard, the object's key, the member and its byte offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from phalanx.core.digest import xxh3
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import ShardEntry, Split, ids_key, index_key, tar_key
from phalanx.stream.shards import MalformedShard, ShardIndex, decode_index, parse_shard


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as the manifest says. member and offset (bytes into the object): None where no one can
    tell.
    """

    shard: str
    key: str
    what: str
    member: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        where = "" if self.member is None else f" member {self.member} at byte {self.offset}:"
        return f"{self.key}:{where} {self.what}"


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """The outcome for one shard. num_bytes: of the objects that were read."""

    shard: str
    num_bytes: int
    damages: tuple[Damage, ...]


def verify_split(store: ObjectStore, split: Split) -> Iterator[ShardCheck]:
    """Checks shard by shard; one shard in memory at a time. Raises only what the store raises."""
    for number in range(split.num_shards):
        yield _verify_shard(store, split, split.shard(number))


def _verify_shard(store: ObjectStore, split: Split, entry: ShardEntry) -> ShardCheck:
    ids, ids_damages = _read(store, entry, ids_key(entry.name), entry.ids_digest)
    index_data, index_damages = _read(store, entry, index_key(entry.name), entry.index_digest)
    tar, tar_damages = _read(store, entry, tar_key(entry.name), entry.digest)
    index = None if index_damages else decode_index(index_data)
    if not ids_damages and len(json.loads(ids)["ids"]) != entry.num_documents:
        ids_damages.append(Damage(entry.name, ids_key(entry.name), f"it does not hold {entry.num_documents} ids"))
    if tar and tar_damages:
        tar_damages = list(_locate(split, entry, tar, index)) or tar_damages
    elif index is not None and not tar_damages and not _agree(tar, index):
        tar_damages.append(Damage(entry.name, tar_key(entry.name), "tar and index disagree"))
    return ShardCheck(
        entry.name, len(ids) + len(index_data) + len(tar), tuple(ids_damages + index_damages + tar_damages)
    )


def _read(store: ObjectStore, entry: ShardEntry, key: str, digest: str) -> tuple[bytes, list[Damage]]:
    """The object's bytes (none where it is missing), and what is wrong with it."""
    try:
        data = store.read(key)
    except ObjectMissing:
        return b"", [Damage(entry.name, key, "it is missing")]
    return data, [] if xxh3(data) == digest else [Damage(entry.name, key, f"its digest is not {digest}")]


def _locate(split: Split, entry: ShardEntry, tar: bytes, index: ShardIndex | None) -> Iterator[Damage]:
    """Where a tar of the wrong digest is damaged: members by their own digests, else the first place that cannot be
    parsed.
    """
    key = tar_key(entry.name)
    if len(tar) != entry.num_bytes:
        yield Damage(entry.name, key, f"it has {len(tar)} bytes instead of {entry.num_bytes}")
    if index is not None:
        spans = zip(
            index.member_offsets.tolist(), index.member_tokens().tolist(), index.member_xxh3.tolist(), strict=True
        )
        for member, (offset, num_tokens, digest) in enumerate(spans):
            if xxhash.xxh3_64_intdigest(tar[offset : offset + num_tokens * split.dtype.itemsize]) != digest:
                yield Damage(entry.name, key, "the tokens do not have their digest", member, offset)
    try:
        for _ in parse_shard(tar):
            pass
    except MalformedShard as error:
        yield Damage(entry.name, key, str(error))


def _agree(tar: bytes, index: ShardIndex) -> bool:
    """Whether the tar by itself gives the members and document lengths that the index gives."""
    members = list(parse_shard(tar))
    lengths = [np.diff(member.bounds.astype(np.int64), prepend=0) for member in members]
    return [member.offset for member in members] == index.member_offsets.tolist() and bool(
        np.array_equal(np.concatenate(lengths), index.lengths)
    )
