"""Parts of a preparation: part I of N (from 1) makes the pieces I, I + N, ...; so an array of jobs shares one input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs import Piece

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Part:
    """number: from 1 to count."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> Part:
        """The part that `I/N` means; raises PhalanxError for anything else."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        part = Part(int(match[1]), int(match[2])) if match else Part(0, 0)
        if not 1 <= part.number <= part.count:
            raise PhalanxError("--part", value=text, expected="I/N with I from 1 to N", remedy="write it like 3/16")
        return part

    def numbers(self, num_pieces: int) -> range:
        """The pieces of this part, from 0."""
        return range(self.number - 1, num_pieces, self.count)


def missing_pieces(where: str, missing: Sequence[int], pieces: Sequence[Piece]) -> PhalanxError:
    """The error of a merge before all parts are done."""
    shown = ", ".join(f"{number + 1} ({pieces[number].spans[0].path})" for number in missing[:_SHOWN])
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return PhalanxError(
        where,
        expected=f"the chunks of all {len(pieces)} pieces; {len(missing)} are missing: piece {shown}{more}",
        remedy="run the parts that make them (piece P is of part (P - 1) mod N + 1 of N), or prepare without --part",
    )
