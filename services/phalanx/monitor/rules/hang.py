"""Which rank hangs, by the records of all ranks, on the monitor's own clock: pure.

A rank enters a section with a phase record; how long it is in it is counted from the record's *arrival*, by a clock
that stands still while the monitor hears nothing (`phalanx.monitor.attention`): a late record makes a section look
shorter, never longer, and no two machines' clocks meet. How long sections take is learned from differences between
records of one rank by its node's own clock. A section may take `max(floor, factor x p99)` of its past, and its own
fixed deadline at most (`phalanx.gang.sections`), plus `patience_s`: the host of the rank sees the same sooner, with
stacks, and should be the one that names the cause. What only the monitor sees is a gang over several hosts.

A rank's time does not count while another one, that has a limit, is less far: only those least far can hang, whoever
waits for them can't. Ranks of nodes that train does not hear are not judged: silence is no hang.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from phalanx.gang.sections import Durations, Rule, allowance
from phalanx.monitor.rules.verdict import Kind, Verdict


@dataclass(frozen=True, slots=True)
class HangRule:
    """sections: when a section is late. patience_s: on top of that."""

    sections: Rule = field(default_factory=Rule)
    patience_s: float = 5.0


@dataclass(frozen=True, slots=True)
class InSection:
    """Where a rank is. num_phases: entered so far in this step. arrived_s: of its record, by the monitor's clock.
    waited_s: until then another rank was less far, by the same clock. since_start_s: of its record, by the clock of its
    node. deadline_s: the section's fixed one, None for none.
    """

    rank: int
    name: str
    step: int
    num_phases: int
    arrived_s: float
    since_start_s: float
    deadline_s: float | None
    node: str = ""
    waited_s: float = 0.0

    @property
    def distance(self) -> tuple[int, int]:
        return (self.step, self.num_phases)

    def own_time_s(self, now_s: float) -> float:
        """How long it is in its section while no other rank was less far."""
        return now_s - max(self.arrived_s, self.waited_s)


def least_far(ranks: Collection[InSection]) -> tuple[int, int] | None:
    """The distance of the rank least far, among those that have a limit; None without one."""
    return min((at.distance for at in ranks if at.deadline_s is not None), default=None)


def hanging(
    rule: HangRule,
    attempt: int,
    ranks: Collection[InSection],
    past: Mapping[str, Durations],
    now_s: float,
    unheard: Collection[str] = (),
) -> Verdict | None:
    """The hang, if there is one. ranks: those that live. now_s: by the monitor's clock. unheard: nodes that are not
    heard.
    """
    if any(at.node in unheard for at in ranks):
        return None
    least = least_far(ranks)
    behind = sorted((at for at in ranks if at.distance == least), key=lambda at: at.rank)
    late = [at for at in behind if _is_late(rule, at, past, now_s)]
    if not late:
        return None
    first, limit = late[0], limit_s(rule, late[0], past)
    who = f"rank {first.rank} is" if len(late) == 1 else f"{len(late)} of {len(ranks)} ranks are"
    long_s = first.own_time_s(now_s)
    message = f"{who} in section {first.name!r} of step {first.step} for {long_s:.1f} s (limit {limit:.1f} s)"
    rank, node = (first.rank, first.node) if len(late) < len(ranks) or len(ranks) == 1 else (None, "")
    return Verdict(Kind.HANG, attempt, first.step, first.step, message, first.step, rank, node, first.name)


def limit_s(rule: HangRule, at: InSection, past: Mapping[str, Durations]) -> float | None:
    """How long the section may take before it is late; None for no limit."""
    limit = allowance(rule.sections, at.name, past.get(at.name, Durations()), at.deadline_s).limit_s
    return None if limit is None else limit + rule.patience_s


def _is_late(rule: HangRule, at: InSection, past: Mapping[str, Durations], now_s: float) -> bool:
    limit = limit_s(rule, at, past)
    return limit is not None and at.own_time_s(now_s) > limit
