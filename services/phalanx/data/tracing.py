"""From a step to the documents in its batch, and from a document to the steps that see it; by the order alone, without
a token read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.verification import decode_ids
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import Split, ids_key
from phalanx.stream.order import Order


@dataclass(frozen=True, slots=True)
class TracedSegment:
    """A part of a document in a window. window: its position on the grid; offset: of its first token in the member."""

    window: int
    document_id: str
    shard: str
    member: int
    offset: int
    length: int
    starts_document: bool
    ends_document: bool


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One pass of the data over a document: the windows that hold its tokens and the steps that train on them."""

    epoch: int
    document_id: str
    shard: str
    windows: tuple[int, ...]
    steps: tuple[int, ...]


class Tracer:
    """Answers for one split, order and batch size; raises OutsideError where the ids of a shard are damaged or
    missing.
    """

    def __init__(self, store: ObjectStore, split: Split, order: Order, global_batch_size: int) -> None:
        self._store, self._split, self._order, self._global_batch_size = store, split, order, global_batch_size
        self._ids = lru_cache(maxsize=16)(self._read_ids)

    def step(self, step: int) -> Iterator[TracedSegment]:
        """Every segment of global batch `step`, counted from 1 as the run counts its steps, window by window."""
        if step < 1:
            raise PhalanxError("--step", value=step, expected="1 or more", remedy="steps are counted from 1")
        first = (step - 1) * self._global_batch_size
        for window in range(first, first + self._global_batch_size):
            for segment in self._order.segments(window):
                yield TracedSegment(
                    window,
                    self._ids(segment.shard)[segment.document],
                    self._split.shard(segment.shard).name,
                    segment.member,
                    segment.offset,
                    segment.length,
                    segment.starts_document,
                    segment.ends_document,
                )

    def document(self, document_id: str, num_epochs: int) -> Iterator[TracedVisit]:
        """When the documents of this id are seen in the first epochs; raises PhalanxError where the split has none."""
        places = [
            (shard, number)
            for shard in range(self._split.num_shards)
            for number, found in enumerate(self._read_ids(shard))
            if found == document_id
        ]
        if not places:
            raise PhalanxError(
                "--document",
                value=document_id,
                expected=f"the id of a document in {self._split.url}",
                remedy="`phalanx data trace JOB --step N` shows ids; it may also lie in the held-out split",
            )
        for epoch in range(num_epochs):
            for shard, number in places:
                windows = tuple(self._order.positions_of(epoch, shard, number))
                steps = tuple(sorted({window // self._global_batch_size + 1 for window in windows}))
                yield TracedVisit(epoch, document_id, self._split.shard(shard).name, windows, steps)

    def _read_ids(self, shard: int) -> list[str]:
        entry = self._split.shard(shard)
        key = ids_key(entry.name)
        try:
            data = self._store.read(key)
            if xxh3(data) != entry.ids_digest:
                raise ValueError(f"its digest is not {entry.ids_digest}")
            return decode_ids(data, entry.num_documents)
        except ObjectMissing:
            raise OutsideError(f"{self._store.url}/{key} is damaged: it is missing") from None
        except ValueError as error:
            raise OutsideError(f"{self._store.url}/{key} is damaged: {error}") from None
