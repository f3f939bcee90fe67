"""Segments: consecutive tokens of one document, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one document. document: its number in the shard; offset: of the first token, inside the
    member's tokens.
    """

    shard: int
    member: int
    offset: int
    length: int
    document: int
    starts_document: bool
    ends_document: bool


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns:
    """Segments in reading order as columns [num_segments]; fields as in Segment."""

    shard: NDArray[np.int64]
    member: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    document: NDArray[np.int64]
    starts_document: NDArray[np.bool_]
    ends_document: NDArray[np.bool_]

    def rows(self) -> tuple[Segment, ...]:
        """The same as one Segment each."""
        columns = (
            self.shard,
            self.member,
            self.offset,
            self.length,
            self.document,
            self.starts_document,
            self.ends_document,
        )
        return tuple(Segment(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


_FIELDS = tuple(SegmentColumns.__dataclass_fields__)
_NONE = np.zeros(0, np.int64)
NO_SEGMENTS = SegmentColumns(_NONE, _NONE, _NONE, _NONE, _NONE, np.zeros(0, np.bool_), np.zeros(0, np.bool_))


def joined(parts: Sequence[SegmentColumns]) -> SegmentColumns:
    """The segments of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_SEGMENTS
    return SegmentColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS})
