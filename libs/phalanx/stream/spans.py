"""Ranges of window positions as int64 [k, 2], half-open; pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def merged(spans: Int64Array) -> Int64Array:
    """The same positions as sorted ranges that neither overlap nor touch; empty ranges are left out."""
    spans = spans[spans[:, 0] < spans[:, 1]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    begins = np.ones(len(spans), bool)
    begins[1:] = spans[1:, 0] > reached[:-1]
    ends = np.roll(begins, -1)
    return np.stack([spans[begins, 0], reached[ends]], axis=1)


def clipped(spans: Int64Array, start: int, stop: int) -> Int64Array:
    """What of merged ranges lies in [start, stop)."""
    cut = np.clip(spans, start, stop)
    return cut[cut[:, 0] < cut[:, 1]]


def at_most(spans: Int64Array, most: int) -> Int64Array:
    """Merged ranges as at most `most` of them, which hold all the positions and, by closing the smallest gaps, as few
    others as that allows.
    """
    assert most > 0
    if len(spans) <= most:
        return spans
    gaps = spans[1:, 0] - spans[:-1, 1]
    kept = np.sort(np.argsort(-gaps, kind="stable")[: most - 1])
    starts = np.concatenate([spans[:1, 0], spans[kept + 1, 0]])
    stops = np.concatenate([spans[kept, 1], spans[-1:, 1]])
    return np.stack([starts, stops], axis=1)


def as_array(spans: object) -> Int64Array:
    """Pairs of numbers as int64 [k, 2]."""
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def holds(spans: Int64Array, position: int) -> bool:
    """Whether one of merged ranges holds the position."""
    before = int(np.searchsorted(spans[:, 0], position, side="right")) - 1
    return before >= 0 and position < int(spans[before, 1])


def hold(spans: Int64Array, positions: Int64Array) -> NDArray[np.bool_]:
    """As `holds`, for each of int64 [n]."""
    if not len(spans):
        return np.zeros(len(positions), bool)
    before = np.searchsorted(spans[:, 0], positions, side="right") - 1
    inside: NDArray[np.bool_] = (before >= 0) & (positions < spans[before, 1])
    return inside
