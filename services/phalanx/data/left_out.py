"""What the journal of a job takes out of training, for the proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.lineage import Lineage
from phalanx.lineage.plan import DAMAGE_KIND, zero_weight_spans
from phalanx.stream.spans import as_array, merged


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """What a journal takes out of training. windows: half-open ranges, int64 [k, 2], merged. shards: the numbers of the
    damaged ones.
    """

    windows: NDArray[np.int64]
    shards: frozenset[int]


def left_out_by(lineage: Lineage) -> LeftOut:
    """What the live journal takes out."""
    newest = lineage.newest_attempt()
    entries = lineage.journal(newest.number) if newest is not None else ()
    numbers = (entry.payload["number"] for entry in entries if entry.kind == DAMAGE_KIND and "number" in entry.payload)
    return LeftOut(merged(as_array(zero_weight_spans(entries))), frozenset(int(number) for number in numbers))
