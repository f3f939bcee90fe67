"""Tells the gang what a rank is doing and by when it must be done, so that a silent rank is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class DeadlineSection(Protocol):
    """What is read of the job's `[deadlines]`, in seconds."""

    @property
    def init_s(self) -> float: ...
    @property
    def restore_s(self) -> float: ...
    @property
    def first_step_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def save_s(self) -> float: ...
    @property
    def evaluation_s(self) -> float: ...
    @property
    def plan_s(self) -> float: ...


# The error of a call that waited in vain comes before its rank is taken for hung.
PATIENCE_S = 15.0


class Phases:
    """Reports each phase as it is entered, with its own time budget; a rank is late when it neither leaves nor renews
    it in time. All ranks enter the same phases in the same order: how far a rank is, is counted in them.

    waits_for_services: what needs a service may take as long as the service may be away.
    """

    def __init__(
        self, report: Callable[..., None], deadlines: DeadlineSection, *, waits_for_services: bool = False
    ) -> None:
        self._report = report
        longest_s = deadlines.plan_s + PATIENCE_S if waits_for_services else 0.0
        self._budget_s: dict[str, float] = {
            "init": deadlines.init_s,
            "restore": deadlines.restore_s,
            "first_step": deadlines.first_step_s,
            "step": deadlines.step_s,
            "profile": deadlines.step_s,  # its own name: what a step takes under the profiler is not learned from steps
            "save": deadlines.save_s,
            "evaluation": deadlines.evaluation_s,
            "plan": max(deadlines.save_s, longest_s),
            "commit": max(deadlines.save_s, longest_s),
        }

    @property
    def longest_s(self) -> float:
        """The longest budget of all, which a collective must outlast."""
        return max(self._budget_s.values())

    def enter(self, name: str, step: int, **fields: Any) -> None:
        """From now on this rank does `name` for `step`."""
        self._report("phase", name=name, step=step, deadline_s=self._budget_s[name], **fields)
