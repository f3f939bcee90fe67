"""Which reading plan an attempt gets, pure: whether it may have one at all, and how far it reaches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.core.errors import PhalanxError
from phalanx.lineage import JournalEntry
from phalanx.lineage.plan import HORIZON_STEPS, ReadingPlan, reading_plan
from phalanx.rpc.errors import NotFound, Superseded


@dataclass(frozen=True, slots=True)
class HorizonPolicy:
    """How many steps a plan reaches: `usual` where the caller leaves it open, never more than `most`.

    A gang that is cut off from its services trains on to its horizon; an operator's change of the journal waits for it.
    """

    usual: int = HORIZON_STEPS
    most: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.usual <= self.most:
            raise PhalanxError(
                "options.horizon_steps",
                value=self.usual,
                expected=f"from 1 to {self.most} steps",
                remedy="correct the configuration of the data service",
            )

    def steps(self, asked: int) -> int:
        """Steps that are granted to a caller who asks for so many; 0 leaves it to us."""
        return min(asked, self.most) if asked else self.usual


@dataclass(frozen=True)
class JournalView:
    """A job's newest attempt, 0 before the first, and the journal that holds for it."""

    newest: int
    entries: tuple[JournalEntry, ...]

    @cached_property
    def plan(self) -> ReadingPlan:
        """What the journal says, before anything is read; made once, as a journal may hold thousands of ranges."""
        return reading_plan(self.entries, 0, 0)


def plan_for(job: str, view: JournalView, attempt: int, step: int, asked: int, policy: HorizonPolicy) -> ReadingPlan:
    """The plan of `attempt` once `step` is done. Raises Superseded, NotFound, or PhalanxError for numbers that cannot
    be.
    """
    for name, value in (("step", step), ("horizon_steps", asked)):
        if value < 0:
            raise PhalanxError(name, value=value, expected="0 or more", remedy="correct the request")
    require_newest(job, view.newest, attempt)
    return replace(view.plan, horizon_step=step + policy.steps(asked))


def require_newest(job: str, newest: int, attempt: int) -> None:
    """Raises Superseded for an attempt before the newest one, NotFound for one that was never opened."""
    where = f"attempt {attempt} of {job}"
    if 1 <= attempt < newest:
        raise Superseded(
            where,
            expected=f"the newest attempt, but attempt {newest} has been opened since",
            remedy="end this one: the job goes on without it, and nothing it writes counts",
        )
    if attempt != newest or attempt < 1:
        found = f"the newest is {newest}" if newest else "it has none yet, or its storage was lost"
        remedy = "correct the number" if newest else "look whether the job's storage is as it was"
        raise NotFound(where, expected=f"an attempt of the job ({found})", remedy=remedy)
