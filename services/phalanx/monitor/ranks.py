"""What the ranks of a run's newest attempt do, from their records."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.gang.sections import LEARNED, Durations
from phalanx.monitor.rules import Verdict
from phalanx.monitor.rules.hang import HangRule, InSection, hanging, least_far
from phalanx.monitor.rules.straggler import StragglerRule, stragglers

MAX_RANKS = 65_536


@dataclass(slots=True)
class _Rank:
    section: InSection
    busy_s: deque[float]
    is_alive: bool = True
    note: str = ""
    parts: record_pb.StepParts | None = None


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank for people. in_section_s: by the monitor's clock. busy_s, parts (of the wall time of its last measured
    step): None where unknown.
    """

    rank: int
    node: str
    section: str
    step: int
    in_section_s: float
    busy_s: float | None
    is_alive: bool
    note: str
    parts: record_pb.StepParts | None = None


@dataclass(slots=True)
class RankTable:
    """The ranks of one attempt. past: durations of sections, over all attempts that this process has seen."""

    hang_rule: HangRule = field(default_factory=HangRule)
    straggler_rule: StragglerRule = field(default_factory=StragglerRule)
    past: dict[str, Durations] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _judged_step: int = 0

    def begin(self) -> None:
        """Another attempt: none of its ranks has said anything."""
        self._ranks.clear()
        self._judged_step = 0

    def end(self) -> None:
        """The attempt is over: none of its ranks lives, whether it told so or not."""
        for rank in self._ranks.values():
            rank.is_alive = False

    def place(self, nodes: Mapping[int, str]) -> None:
        """Where the ranks run."""
        self.nodes = nodes

    def observe(self, attempt: int, record: record_pb.Record, now_s: float) -> tuple[Verdict, ...]:
        """Takes a record that arrived at `now_s` by the monitor's clock; the stragglers that it shows."""
        if record.rank not in self._ranks and len(self._ranks) >= MAX_RANKS:
            return ()
        rank = self._rank(record, now_s)
        kind = record.WhichOneof("event")
        if kind == "phase":
            self._enter(rank, record, now_s)
        elif kind == "step_time":
            return self._step_time(rank, attempt, record.step_time)
        elif kind == "ended":
            rank.is_alive = False
            rank.note = rank.note or _told(record.ended)
        elif kind == "error":
            rank.is_alive, rank.note = False, record.error.message
        elif kind == "finished":
            rank.is_alive = False
        return ()

    def hang(self, attempt: int, now_s: float, unheard: frozenset[str]) -> Verdict | None:
        """The hang at `now_s` by the monitor's clock, if there is one."""
        living = [rank for rank in self._ranks.values() if rank.is_alive]
        sections = [replace(rank.section, node=self.nodes.get(rank.section.rank, "")) for rank in living]
        least = least_far(sections)
        for rank in living:
            if least is not None and rank.section.distance > least:
                rank.section = replace(rank.section, waited_s=now_s)
        return hanging(self.hang_rule, attempt, sections, self.past, now_s, unheard)

    def mark(self, verdict: Verdict) -> None:
        """What is wrong with a rank."""
        if verdict.rank in self._ranks:
            self._ranks[verdict.rank].note = verdict.message

    def pause(self, nodes: frozenset[str], now_s: float) -> None:
        """Until `now_s` the time of the ranks on these nodes does not count."""
        for number, rank in self._ranks.items():
            if self.nodes.get(number, "") in nodes:
                rank.section = replace(rank.section, waited_s=now_s)

    def nodes_with_ranks(self) -> frozenset[str]:
        """Where living ranks run; "" for a rank whose place is not known."""
        return frozenset(self.nodes.get(number, "") for number, rank in self._ranks.items() if rank.is_alive)

    def views(self, now_s: float) -> tuple[RankView, ...]:
        """All ranks by number; those that have a place and have said nothing as well."""
        numbers = sorted(self._ranks.keys() | self.nodes.keys())
        return tuple(self._view(number, now_s) for number in numbers)

    def _view(self, number: int, now_s: float) -> RankView:
        node = self.nodes.get(number, "")
        if number not in self._ranks:
            return RankView(number, node, "", 0, 0.0, None, True, "")
        rank = self._ranks[number]
        section = rank.section
        busy_s = median(rank.busy_s) if rank.busy_s else None
        in_section_s = max(0.0, now_s - section.arrived_s)
        return RankView(
            number, node, section.name, section.step, in_section_s, busy_s, rank.is_alive, rank.note, rank.parts
        )

    def _rank(self, record: record_pb.Record, now_s: float) -> _Rank:
        if record.rank not in self._ranks:
            section = InSection(record.rank, "", 0, 0, now_s, record.since_start_s, None)
            self._ranks[record.rank] = _Rank(section, deque(maxlen=self.straggler_rule.num_steps))
        return self._ranks[record.rank]

    def _enter(self, rank: _Rank, record: record_pb.Record, now_s: float) -> None:
        before, phase = rank.section, record.phase
        took_s = record.since_start_s - before.since_start_s
        if before.name in LEARNED and took_s >= 0:
            self.past[before.name] = self.past.get(before.name, Durations()).plus(took_s)
        step = phase.step or before.step
        rank.is_alive = True
        rank.section = InSection(
            record.rank,
            phase.name,
            step,
            before.num_phases + 1 if step == before.step else 1,
            now_s,
            record.since_start_s,
            phase.deadline_s if phase.HasField("deadline_s") else None,
        )

    def _step_time(self, rank: _Rank, attempt: int, told: record_pb.StepTime) -> tuple[Verdict, ...]:
        if told.HasField("parts"):
            rank.parts = told.parts
        if told.busy_s <= 0:  # not known
            return ()
        rank.busy_s.append(told.busy_s)
        if told.step < self._judged_step + self.straggler_rule.num_steps // 4:
            return ()
        self._judged_step = told.step
        busy_s = {number: tuple(each.busy_s) for number, each in self._ranks.items() if each.is_alive}
        return stragglers(self.straggler_rule, attempt, told.step, busy_s, self.nodes)


def _told(ended: record_pb.Ended) -> str:
    if ended.signal:
        return f"ended by signal {ended.signal}" + (", sent by its gang" if ended.sent_by_us else "")
    return f"exit code {ended.exit_code}" if ended.exit_code else ""
