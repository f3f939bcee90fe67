"""The shares of steps that this node keeps in memory for itself and for the node before it: anonymous memory, no files.

A share is the objects of one node's ranks, byte for byte as storage would hold them. It comes in piece by piece, in any
order, and counts as whole once every object has its digest; only then does this node vote (`snapshot.replicas`). Two
steps are kept at most, as `Shelf` says, within a limit of bytes that is held against a share before its first byte.
Killed: the memory is gone with the process, and the next agent of the node holds nothing and has voted for nothing.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.digest import BytesLike, digest_of, xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.snapshot.replicas import Copy, Shelf

PIECE_BYTES: Final = 8 << 20  # of a message, far below the limit
_ALIGNMENT: Final = 64


def share_digest(objects: Iterable[ObjectRef]) -> str:
    """Digest of a share: of its objects' keys, sizes and digests, in the order of their keys."""
    rows = sorted((each.key, each.num_bytes, each.digest) for each in objects)
    return digest_of({"objects": [list(row) for row in rows]})


@dataclass(slots=True)
class _Share:
    """Memory of one share. starts: by key the byte at which an object lies. is_open: whether bytes may still come."""

    objects: dict[str, ObjectRef]
    starts: dict[str, int]
    memory: mmap.mmap
    is_open: bool = True
    is_whole: bool = False

    @staticmethod
    def of(objects: Sequence[ObjectRef]) -> _Share:
        starts, position = {}, 0
        for each in objects:
            starts[each.key] = position
            position += -(-each.num_bytes // _ALIGNMENT) * _ALIGNMENT
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return _Share({each.key: each for each in objects}, starts, mmap.mmap(-1, max(1, position), flags=flags))

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def place(self, key: str, offset: int, length: int) -> slice:
        """Where bytes of an object lie. Raises PhalanxError for such as it does not have."""
        known = self.objects.get(key)
        if known is None or offset < 0 or length < 0 or offset + length > known.num_bytes:
            raise PhalanxError(
                f"replica {key}",
                value=f"bytes {offset} to {offset + length}",
                expected="bytes of an object that was announced with the share",
                remedy="announce the share as it is",
            )
        start = self.starts[key] + offset
        return slice(start, start + length)

    def damaged(self) -> list[str]:
        """The keys of objects that are not what was announced, or did not come whole."""
        with memoryview(self.memory) as view:
            return [
                key for key, ref in self.objects.items() if xxh3(view[self.place(key, 0, ref.num_bytes)]) != ref.digest
            ]


class ReplicaMemory:
    """What this node keeps of one job. owners: whose shares. max_bytes: of all its memory. Safe from any thread."""

    def __init__(self, owners: Iterable[str], max_bytes: int) -> None:
        self._shelf = Shelf(frozenset(owners))
        self._max_bytes = max_bytes
        self._shares: dict[tuple[CheckpointRef, str], _Share] = {}
        self._lock = threading.Lock()

    @property
    def shelf(self) -> Shelf:
        """What is kept now."""
        with self._lock:
            return self._shelf

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        with self._lock:
            return sum(share.num_bytes for share in self._shares.values())

    def copies(self, keeper: str) -> dict[CheckpointRef, frozenset[Copy]]:
        """The shares that lie whole here, by step, as this node (`keeper`) tells of them."""
        with self._lock:
            found: dict[CheckpointRef, set[Copy]] = {}
            for (ref, owner), share in self._shares.items():
                if share.is_whole:
                    found.setdefault(ref, set()).add(Copy(owner, keeper, share_digest(share.objects.values())))
            return {ref: frozenset(copies) for ref, copies in found.items()}

    def begin(self, ref: CheckpointRef, owner: str, objects: Sequence[ObjectRef]) -> bool:
        """A share comes in; one that began already begins anew. False where it is whole already, and nothing need come.
        Raises PhalanxError for a step or owner that is not to be kept here, OutsideError where there is no room.
        """
        share = _Share.of(objects)  # address space only: pages come with the bytes
        with self._lock:
            if owner not in self._shelf.owners:
                raise PhalanxError(
                    f"replica of {owner}",
                    expected=f"a share of {', '.join(sorted(self._shelf.owners))}",
                    remedy="send it to the partner of its node",
                )
            known = self._shares.get((ref, owner))
            if known is not None and known.is_whole:
                return False
            shelf = self._shelf.begin(ref)
            kept = sum(
                each.num_bytes for key, each in self._shares.items() if key[0] in shelf.kept and key != (ref, owner)
            )
            if kept + share.num_bytes > self._max_bytes:
                raise OutsideError(
                    f"no room for {share.num_bytes} bytes of {owner}'s share of {ref}: "
                    f"{kept} of {self._max_bytes} bytes are taken"
                )
            self._take(shelf)
            self._shares[ref, owner] = share
        return True

    def write(self, ref: CheckpointRef, owner: str, key: str, offset: int, data: BytesLike) -> None:
        """Bytes of an object of a share that has begun. Raises PhalanxError for others, and for a share that is whole
        or was overtaken.
        """
        view = memoryview(data).cast("B")
        with self._lock:
            share = self._coming(ref, owner)
            share.memory[share.place(key, offset, len(view))] = view

    def finish(self, ref: CheckpointRef, owner: str) -> None:
        """The share has come: it is whole, once every object has its digest. Raises OutsideError where one hasn't; then
        the share is dropped. Said twice it is said once.
        """
        with self._lock:
            known = self._shares.get((ref, owner))
            if known is not None and known.is_whole:
                return
            share = self._coming(ref, owner)
            share.is_open = False
        damaged = share.damaged()  # outside of the lock: seconds for tens of GB
        with self._lock:
            if self._shares.get((ref, owner)) is not share:
                raise self._gone(ref, owner)
            if damaged:
                del self._shares[ref, owner]
                raise OutsideError(f"the share of {owner} of {ref} did not come whole: {damaged[0]} has other bytes")
            share.is_whole = True
            self._take(self._shelf.finish(ref, owner))

    def read(self, ref: CheckpointRef, key: str, offset: int, length: int) -> bytes:
        """Bytes of an object of a share that is whole here. Raises OutsideError where there is none."""
        with self._lock:
            for (at, _), share in self._shares.items():
                if at == ref and share.is_whole and key in share.objects:
                    return share.memory[share.place(key, offset, length)]
        raise OutsideError(f"{key} of {ref} is not kept here")

    def seal(self, ref: CheckpointRef) -> None:
        """The step is sealed: the one before leaves."""
        with self._lock:
            self._take(self._shelf.seal(ref))

    def give_up(self, ref: CheckpointRef) -> None:
        """The step will not be sealed: it leaves."""
        with self._lock:
            self._take(self._shelf.give_up(ref))

    def _coming(self, ref: CheckpointRef, owner: str) -> _Share:
        share = self._shares.get((ref, owner))
        if share is None or not share.is_open:
            raise self._gone(ref, owner)
        return share

    def _gone(self, ref: CheckpointRef, owner: str) -> PhalanxError:
        return PhalanxError(
            f"share of {owner} of {ref}", expected="one that has begun to come in", remedy="begin it, or leave it out"
        )

    def _take(self, shelf: Shelf) -> None:
        """The lock is held. Memory of what is kept no more goes back to the system with its last reader."""
        self._shelf = shelf
        self._shares = {key: share for key, share in self._shares.items() if key[0] in shelf.kept}
