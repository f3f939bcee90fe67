"""Checks every byte of a dataset: sizes and digests of shards, indices, ids and the tokenizer, and that tar and index
tell the same story. The manifests themselves are taken as they are: a job names one by `data.train_digest`.

Damage is named by the shard, the object's key, the member and its byte offset: all bytes of a tar but the tokens follow
from its index. What is wrong is read once more before it is called damage. Memory: for each thread one chunk of a tar,
and the index and ids of its shard.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from phalanx.core.digest import sha256, xxh3
from phalanx.data.catalog import FoundSplit, LostSplit
from phalanx.data.checked import SplitChecked, versions_digest
from phalanx.data.tar_check import Chunks, flaws_of
from phalanx.objects import ObjectMissing, ObjectStore, StorageSettings
from phalanx.stream.ids import decode_ids
from phalanx.stream.layout import parts_of
from phalanx.stream.manifest import MANIFEST_KEY, ShardEntry, Split, ids_key, index_key, tar_key
from phalanx.stream.shards import MalformedShard, ShardIndex, decode_index, parse_shard
from phalanx.stream.token_text import TOKENIZER_KEY, folder_above

ABOVE: Final = ".."
THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it should be. shard: None for tokenizer and manifest. member and offset (bytes into the
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
    """The outcome for one shard. num_bytes: of the objects that were read. is_earlier: an earlier check read them, and
    they were not written since.
    """

    shard: str
    num_bytes: int
    damages: tuple[Damage, ...]
    is_earlier: bool = False


class _AbandonedError(Exception):
    """Nobody waits for this check any more."""


def verify_split(
    store: ObjectStore,
    split: Split,
    observe: Callable[[int], None] = lambda num_bytes: None,
    threads: int = THREADS,
    checked: SplitChecked | None = None,
) -> Iterator[ShardCheck]:
    """Checks all shards, several at a time, and tells of each in the manifest's order. observe: told, from any thread,
    how many bytes of tars are done. checked: shards that are not read again, to which those found whole are added.
    Raises only what the store and `checked` raise; who stops asking waits for no read, and threads end with their next.
    """
    is_over = threading.Event()

    def told(num_bytes: int) -> None:
        if is_over.is_set():
            raise _AbandonedError
        observe(num_bytes)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="verify")
    try:
        started = deque[Future[ShardCheck]]()
        for number in range(split.num_shards):
            started.append(pool.submit(_verify_shard, store, split, number, told, checked))
            if len(started) > 2 * threads:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()
    finally:
        is_over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def lost_manifests(lost: Sequence[LostSplit]) -> tuple[tuple[str, Damage], ...]:
    """What is wrong with splits that have no manifest, each by its folder: no shard of theirs can be checked."""
    what = "it is missing, so none of its shards was checked: it was lost, or the dataset is not finished"
    return tuple((each.path, Damage(None, MANIFEST_KEY, what)) for each in lost)


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
        store = folder_above(root.url, settings) if folder == ABOVE else root.within(folder) if folder else root
        data = None if store is None else _read_if_there(store, TOKENIZER_KEY)
        if data is not None:
            digest = found.split.tokenizer_digest
            damage = Damage(None, TOKENIZER_KEY, f"its digest is not {digest}")
            return None if sha256(data) == digest else (folder, damage)
    if found.split.recipe.get("has_tokenizer") is False:  # an import that knows its tokenizer by the digest alone
        return None
    return above, Damage(None, TOKENIZER_KEY, "it is missing")


def _verify_shard(
    store: ObjectStore, split: Split, number: int, observe: Callable[[int], None], checked: SplitChecked | None
) -> ShardCheck:
    entry = split.shard(number)
    versions = None if checked is None else _versions(store, entry)
    if checked is not None and versions is not None:
        num_bytes = checked.num_bytes(number, versions)
        if num_bytes is not None:
            observe(entry.num_bytes)
            return ShardCheck(entry.name, num_bytes, (), is_earlier=True)
    check = _checked(store, split, entry, observe)
    if check.damages:
        check = _checked(store, split, entry, lambda num_bytes: None)
    if checked is not None and versions is not None and not check.damages:
        checked.add(number, versions, check.num_bytes)
    return check


def _versions(store: ObjectStore, entry: ShardEntry) -> str | None:
    """Those of a shard's objects, as one; None where one is missing."""
    try:
        return versions_digest([store.version(key(entry.name)) for key in (tar_key, index_key, ids_key)])
    except ObjectMissing:
        return None


def _checked(store: ObjectStore, split: Split, entry: ShardEntry, observe: Callable[[int], None]) -> ShardCheck:
    ids, damages = _read(store, entry, ids_key(entry.name), entry.ids_digest)
    if not damages:
        damages += _ids_damages(entry, ids)
    index_data, index_damages = _read(store, entry, index_key(entry.name), entry.index_digest)
    index = None
    if not index_damages:
        try:
            index = decode_index(index_data)
        except MalformedShard as error:
            index_damages.append(Damage(entry.name, index_key(entry.name), str(error)))
    num_bytes, tar_damages = _tar_damages(store, split, entry, index, observe)
    return ShardCheck(entry.name, len(ids) + len(index_data) + num_bytes, (*damages, *index_damages, *tar_damages))


def _tar_damages(
    store: ObjectStore, split: Split, entry: ShardEntry, index: ShardIndex | None, observe: Callable[[int], None]
) -> tuple[int, list[Damage]]:
    """Bytes of a tar, and what is wrong with it: with its index part by part, without it by its digest and headers."""
    key = tar_key(entry.name)
    try:
        num_bytes = store.info(key).num_bytes
        chunks = Chunks(lambda offset, length: store.read(key, offset, length), num_bytes, observe)
        parts = iter(()) if index is None else parts_of(entry.name, index, split.dtype)
        flaws = [Damage(entry.name, key, flaw.what, flaw.member, flaw.offset) for flaw in flaws_of(chunks, parts)]
        is_right, is_whole = chunks.digest == entry.digest, num_bytes == entry.num_bytes or index is None
        # Without the index's help, or against its word, the tar is read whole to tell where it breaks the format.
        told = _told(store, key, entry) if is_right == bool(flaws) and is_whole else []
    except ObjectMissing:
        return 0, [Damage(entry.name, key, "it is missing")]
    if num_bytes != entry.num_bytes:
        what = f"it has {num_bytes} bytes instead of {entry.num_bytes}"
        flaws.insert(0, Damage(entry.name, key, what, None, min(num_bytes, entry.num_bytes)))
    elif is_right and flaws:
        flaws.insert(0, Damage(entry.name, key, "tar and index disagree"))
    elif not is_right and not flaws and not told:
        flaws.append(Damage(entry.name, key, f"its digest is not {entry.digest}"))
    return num_bytes, flaws + told


def _told(store: ObjectStore, key: str, entry: ShardEntry) -> list[Damage]:
    try:
        for _ in parse_shard(store.read(key)):
            pass
    except MalformedShard as error:
        return [Damage(entry.name, key, str(error))]
    return []


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
