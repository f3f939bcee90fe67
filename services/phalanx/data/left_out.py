"""What the journal of a job says of its reading, for the proof and for tracing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.lineage import Lineage
from phalanx.lineage.plan import DAMAGE_KIND, ReadingPlan, reading_plan
from phalanx.stream.spans import as_array, merged


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """What a journal takes out of training. windows: half-open ranges of positions, int64 [k, 2], merged. shards: the
    numbers of the damaged ones. plan: all that the journal says.
    """

    windows: NDArray[np.int64]
    shards: frozenset[int]
    plan: ReadingPlan


def left_out_by(lineage: Lineage) -> LeftOut:
    """What the live journal takes out."""
    newest = lineage.newest_attempt()
    entries = lineage.journal(newest.number) if newest is not None else ()
    numbers = (entry.payload["number"] for entry in entries if entry.kind == DAMAGE_KIND and "number" in entry.payload)
    plan = reading_plan(entries, 0, 0)
    return LeftOut(merged(as_array(plan.zero_weight)), frozenset(int(number) for number in numbers), plan)
