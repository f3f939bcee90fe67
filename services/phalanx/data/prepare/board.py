"""Who makes what: pieces that are finished, in work and needed, and the progress that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from phalanx.data.prepare.inputs import Piece
from phalanx.data.prepare.progress import Figures, OnProgress, Phase, Progress


class Board:
    """Engines report to it from one thread. finished: raw bytes of the pieces that are finished already, by number.

    figures, num_made: of the pieces that were finished since.
    """

    def __init__(
        self, pieces: Sequence[Piece], max_bytes: int | None, finished: Mapping[int, int], tell: OnProgress
    ) -> None:
        self._pieces, self._max_bytes, self._tell = pieces, max_bytes, tell
        self._raw_bytes = np.zeros(len(pieces), np.int64)
        self._listed_done = 0
        self._total = sum(piece.num_bytes for piece in pieces)
        self._working: dict[int, Figures] = {}
        self.figures, self.num_made = Figures(), 0
        for number, num_bytes in finished.items():
            self._raw_bytes[number] = num_bytes
            self._listed_done += pieces[number].num_bytes

    def is_needed(self, number: int) -> bool:
        """False where the pieces before hold more than the cap already, so that nothing of this one is taken."""
        return self._max_bytes is None or int(self._raw_bytes[:number].sum()) <= self._max_bytes

    def working(self, number: int, figures: Figures) -> None:
        """A piece is in work and gave so much so far."""
        self._working[number] = figures
        self.show()

    def lost(self, number: int) -> None:
        """What was made of a piece is lost with its worker."""
        self._working.pop(number, None)

    def finished(self, number: int, figures: Figures) -> None:
        """A piece is finished."""
        self._working.pop(number, None)
        self._raw_bytes[number] = figures.num_bytes
        self._listed_done += self._pieces[number].num_bytes
        self.figures += figures
        self.num_made += 1
        self.show()

    def show(self) -> None:
        """Tells how far all is."""
        now, done = self.figures, self._listed_done
        for number, figures in self._working.items():
            now += figures
            done += min(figures.num_bytes, self._pieces[number].num_bytes)
        total = self._total if self._max_bytes is None else min(self._total, self._max_bytes)
        self._tell(Progress(Phase.CHUNKS, now.num_records, min(done, total), now.num_tokens, total))
