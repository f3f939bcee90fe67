"""Windows as they are handed over: tokens as stored, and where documents begin and targets are ignored; pure.

What a model takes (shifted targets, positions, document numbers) follows from these by a few operations, which are
done where the model is: a batch is a quarter or less of its int64 form, and the host writes it once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.stream.parts import parts, parts_of_places, slices

IGNORED_TARGET = -100


@dataclass(frozen=True, slots=True, eq=False)
class PackedWindows:
    """n windows of S = seq_len tokens.

    tokens: uint16 or uint32 [n, S + 1]; the last column is the token behind the window (0 where it is not read). Rows
    may overlap in memory: write to copies only. starts: int64 [m], sorted, places row x S + column at which a document,
    or the rest of one, begins; the first of each row among them (without a document mask: only those). ignored: int64
    [k], sorted, places whose target does not count. counts: bool [n], false for a row without any target, whose tokens
    are 0.
    """

    tokens: NDArray[np.unsignedinteger]
    starts: NDArray[np.int64]
    ignored: NDArray[np.int64]
    counts: NDArray[np.bool_]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and tokens of a window."""
        return self.tokens.shape[0], self.tokens.shape[1] - 1

    def inputs(self) -> NDArray[np.int64]:
        """int64 [n, S]."""
        return self.tokens[:, :-1].astype(np.int64)

    def targets(self) -> NDArray[np.int64]:
        """int64 [n, S]: each token's successor, IGNORED_TARGET where it does not count."""
        targets = self.tokens[:, 1:].astype(np.int64)
        targets.reshape(-1)[self.ignored] = IGNORED_TARGET
        targets[~self.counts] = IGNORED_TARGET
        return targets

    def position_ids(self) -> NDArray[np.int64]:
        """int64 [n, S]: 0 at each start, rising by 1."""
        return (np.arange(self._size) - np.repeat(self.starts, self._lengths())).reshape(self.shape)

    def document_ids(self) -> NDArray[np.int64]:
        """int64 [n, S]: the number of each document within its window."""
        numbers = np.repeat(np.arange(len(self.starts)), self._lengths()).reshape(self.shape)
        return numbers - numbers[:, :1]

    def split(self, edges: NDArray[np.int64]) -> list[PackedWindows]:
        """The rows between each two of `edges`, int64 [parts + 1], from 0 to n, as windows of their own."""
        places, rows = edges * self.shape[1], slices(edges)
        columns = (
            parts(self.tokens, rows),
            parts_of_places(self.starts, places),
            parts_of_places(self.ignored, places),
            parts(self.counts, rows),
        )
        return list(map(PackedWindows, *columns))

    @property
    def _size(self) -> int:
        return self.shape[0] * self.shape[1]

    def _lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts, append=self._size)
