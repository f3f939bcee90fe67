"""Checks every byte of a dataset: sizes and digests of shards, indices, ids and the tokenizer, and that tar and index
tell the same story. The manifests themselves are taken as they are: a job names one by `data.train_digest`.

Damage is named as closely as the digests allow: the shard, the object's key, the member and its byte offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from phalanx.core.digest import sha256, xxh3
from phalanx.data.catalog import FoundSplit
from phalanx.objects import ObjectMissing, ObjectStore, StorageSettings, open_store
from phalanx.stream.ids import decode_ids
from phalanx.stream.manifest import ShardEntry, Split, ids_key, index_key, tar_key
from phalanx.stream.shards import MalformedShard, ShardIndex, decode_index, parse_shard

TOKENIZER_KEY = "tokenizer.json"
ABOVE = ".."


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as the manifest says. shard: None for the tokenizer. member and offset (bytes into the
    object): None where no one can tell.
    """

    shard: str | None
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


def verify_tokenizers(
    root: ObjectStore, splits: Sequence[FoundSplit], settings: StorageSettings | None = None
) -> tuple[tuple[str, Damage], ...]:
    """What is wrong with the tokenizer.json of the splits found below `root`, each by its folder relative to `root`
    (`ABOVE`: the one above it, opened with `settings`).

    A split's tokenizer lies in its own folder or in the one above, which the splits of a dataset share.
    """
    checks = (_verify_tokenizer(root, found, settings) for found in splits)
    return tuple(dict.fromkeys(check for check in checks if check is not None))


def _verify_tokenizer(
    root: ObjectStore, found: FoundSplit, settings: StorageSettings | None
) -> tuple[str, Damage] | None:
    above = found.path.rpartition("/")[0] if found.path else ABOVE
    for folder in (found.path, above):
        store = _above(root, settings) if folder == ABOVE else root.within(folder) if folder else root
        data = None if store is None else _read_if_there(store, TOKENIZER_KEY)
        if data is not None:
            digest = found.split.tokenizer_digest
            damage = Damage(None, TOKENIZER_KEY, f"its digest is not {digest}")
            return None if sha256(data) == digest else (folder, damage)
    return above, Damage(None, TOKENIZER_KEY, "it is missing")


def _above(store: ObjectStore, settings: StorageSettings | None) -> ObjectStore | None:
    """The folder above a store's; None for a whole bucket."""
    scheme, _, path = store.url.partition("://")
    folder, slash, _ = path.rstrip("/").rpartition("/")
    return open_store(f"{scheme}://{folder or slash}", settings) if slash else None


def _verify_shard(store: ObjectStore, split: Split, entry: ShardEntry) -> ShardCheck:
    ids, ids_damages = _read(store, entry, ids_key(entry.name), entry.ids_digest)
    index_data, index_damages = _read(store, entry, index_key(entry.name), entry.index_digest)
    tar, tar_damages = _read(store, entry, tar_key(entry.name), entry.digest)
    index = None if index_damages else decode_index(index_data)
    if not ids_damages:
        ids_damages += _ids_damages(entry, ids)
    if tar and tar_damages:
        tar_damages = list(_locate(split, entry, tar, index)) or tar_damages
    elif index is not None and not tar_damages and not _agree(tar, index):
        tar_damages.append(Damage(entry.name, tar_key(entry.name), "tar and index disagree"))
    return ShardCheck(
        entry.name, len(ids) + len(index_data) + len(tar), tuple(ids_damages + index_damages + tar_damages)
    )


def _read(store: ObjectStore, entry: ShardEntry, key: str, digest: str) -> tuple[bytes, list[Damage]]:
    """The object's bytes (none where it is missing), and what is wrong with it."""
    data = _read_if_there(store, key)
    if data is None:
        return b"", [Damage(entry.name, key, "it is missing")]
    return data, [] if xxh3(data) == digest else [Damage(entry.name, key, f"its digest is not {digest}")]


def _read_if_there(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.read(key)
    except ObjectMissing:
        return None


def _ids_damages(entry: ShardEntry, ids: bytes) -> list[Damage]:
    try:
        decode_ids(ids, entry.num_documents)
    except ValueError as error:
        return [Damage(entry.name, ids_key(entry.name), str(error))]
    return []


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
