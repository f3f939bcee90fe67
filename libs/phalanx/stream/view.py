"""What a reading plan says of positions: which window of which source lies there, and whether it is taken out of
training; pure.

Two things take windows out. Ranges of positions (`zero_weight`) do whatever lies there; damage names windows of a
source's own stream (`lost`), as these keep their numbers when the mixture changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.stream.mixture import NOWHERE, Mixture
from phalanx.stream.spans import as_array, hold, merged

Int64: TypeAlias = NDArray[np.int64]


class View:
    """zero_weight: half-open ranges of positions; lost: for a source's number, half-open ranges of its own windows."""

    def __init__(
        self,
        mixture: Mixture | None = None,
        zero_weight: Sequence[tuple[int, int]] = (),
        lost: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self.mixture = mixture if mixture is not None else Mixture()
        self._zero_weight = merged(as_array(zero_weight))
        self._lost = {source: merged(as_array(spans)) for source, spans in (lost or {}).items() if spans}

    @property
    def end(self) -> int | None:
        """The first position for which no source has a window left, None where there is none."""
        return self.mixture.end

    def place(self, positions: Int64) -> tuple[Int64, Int64]:
        """See `Mixture.place`."""
        return self.mixture.place(positions)

    def left_out(self, positions: Int64) -> NDArray[np.bool_]:
        """Whether each window is taken out of training, bool [n]."""
        found = hold(self._zero_weight, positions)
        if self._lost:
            found = found | self._is_lost(*self.place(positions))
        return found

    def next_left_out(self, positions: Int64) -> NDArray[np.bool_]:
        """Whether the next window of the same source is taken out, so that its first token, the last target of the
        window at each position, may not be read; bool [n].
        """
        if not (len(self._zero_weight) or self._lost):
            return np.zeros(len(positions), bool)
        sources, windows = self.place(positions)
        found = self._is_lost(sources, windows + 1)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            after = self.mixture.positions(source, windows[rows] + 1)
            found[rows] |= (after != NOWHERE) & hold(self._zero_weight, after)
        return found

    def _is_lost(self, sources: Int64, windows: Int64) -> NDArray[np.bool_]:
        found = np.zeros(len(sources), bool)
        for source, spans in self._lost.items():
            found |= (sources == source) & hold(spans, windows)
        return found
