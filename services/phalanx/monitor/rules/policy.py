"""From a verdict to what is asked of train: the job's `[recovery]`, pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from phalanx.monitor.rules.verdict import Kind, Verdict


class Action(StrEnum):
    """What a policy may ask for; names are those of the contract."""

    NOTIFY = "notify"
    SKIP = "skip"
    ROLL_BACK = "roll_back"
    RESTART = "restart"


LOSS_ACTIONS = frozenset({Action.NOTIFY, Action.SKIP, Action.ROLL_BACK})
HANG_ACTIONS = frozenset({Action.NOTIFY, Action.RESTART})


@dataclass(frozen=True, slots=True)
class Policy:
    """What to ask for, by what went wrong. People are told in any case; stragglers and GPU faults are only told. A
    single step that is not finite was left out by the ranks themselves: there is nothing to roll back for.
    """

    on_nan: Action = Action.SKIP
    on_spike: Action = Action.NOTIFY
    on_divergence: Action = Action.NOTIFY
    on_hang: Action = Action.RESTART

    @staticmethod
    def of(recovery: object) -> Policy:
        """The policy in a job's `[recovery]`; a key that it lacks keeps its default.

        Raises ValueError for an action that the key cannot have.
        """
        chosen = {
            name: Action(value)
            for name in ("on_nan", "on_spike", "on_divergence", "on_hang")
            if (value := getattr(recovery, name, None)) is not None
        }
        for name, action in chosen.items():
            if action not in (HANG_ACTIONS if name == "on_hang" else LOSS_ACTIONS):
                raise ValueError(f"{name} = {action.value}")
        return Policy(**chosen)

    def action(self, verdict: Verdict) -> Action:
        """What to ask for."""
        is_single = verdict.first_step == verdict.last_step
        if verdict.kind is Kind.NAN and self.on_nan is Action.ROLL_BACK and is_single:
            return Action.NOTIFY
        return {
            Kind.NAN: self.on_nan,
            Kind.SPIKE: self.on_spike,
            Kind.DIVERGENCE: self.on_divergence,
            Kind.HANG: self.on_hang,
        }.get(verdict.kind, Action.NOTIFY)
