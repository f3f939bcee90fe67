"""By how much two tensors differ, in float64, from pieces of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from phalanx.snapshot.dtypes import bfloat16_to_float32

_BLOCK: Final = 1 << 18  # elements that are widened to float64 at once


@dataclass(frozen=True, slots=True)
class Norms:
    """Euclidean norms over all elements, each widened to float64: of A, of B, of A - B, and the last relative to that
    of A; and in how many elements the bits differ. NaN and infinities in a tensor are in its norms.
    """

    a: float
    b: float
    difference: float
    num_changed: int

    @property
    def relative(self) -> float:
        """||A - B|| / ||A||: 0 where nothing differs, infinite where A is zero."""
        if self.a:
            return self.difference / self.a
        return math.inf if self.difference else 0.0


class Sums:
    """Sums over the elements of one tensor, as its slabs pass."""

    def __init__(self) -> None:
        self._a = self._b = self._difference = 0.0
        self._num_changed = 0

    def add(self, a: np.ndarray, b: np.ndarray, dtype: str) -> None:
        """Takes a slab: the same elements of both, as they are stored."""
        a, b = a.reshape(-1), b.reshape(-1)
        for first in range(0, len(a), _BLOCK):
            self._add_block(a[first : first + _BLOCK], b[first : first + _BLOCK], dtype)

    def _add_block(self, a: np.ndarray, b: np.ndarray, dtype: str) -> None:
        bits = f"u{a.dtype.itemsize}"
        differs = a.view(bits) != b.view(bits)
        self._num_changed += int(np.count_nonzero(differs))
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = _float64(a, dtype), _float64(b, dtype)
            self._a += float(np.square(x).sum())
            self._b += float(np.square(y).sum())
            self._difference += float(np.square((x - y)[differs]).sum())  # equal infinities differ by nothing

    def norms(self) -> Norms:
        """The norms of all that was taken."""
        return Norms(math.sqrt(self._a), math.sqrt(self._b), math.sqrt(self._difference), self._num_changed)


def _float64(values: np.ndarray, dtype: str) -> np.ndarray:
    return (bfloat16_to_float32(values) if dtype == "bfloat16" else values).astype(np.float64)
