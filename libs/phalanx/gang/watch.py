"""Which rank hangs: a pure reading of the phases that ranks reported, on the host's monotonic clock.

A rank enters its import with the `entry` event, later phases by `report("phase", name=..., step=..., deadline_s=...)`
and is late when it has stayed in it longer than its own deadline. The time in which it waited for a rank less far that
was within its own deadline does not count: so a save that takes its time on one rank is no hang of its peers. When one
rank stops, all its peers are soon late too: the culprit is the one least far in progress and, among those equally far,
the one that does not wait inside a collective.

The deadline of a section that has been seen often enough is learned (`sections`). Of a gang over several hosts one host
sees its own ranks alone: what waits there inside a collective may wait for a slow but honest rank elsewhere, so it gets
the longest deadline of any phase seen on top of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.gang.cause import Cause
from phalanx.gang.order import Event
from phalanx.gang.sections import Durations, Rule, allowance

NUM_TOP_FRAMES = 12
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_TORCH = re.compile(r"(^|/)torch/")
_COLLECTIVE = re.compile(r"(^|/)torch/distributed/")
_TIMED_WAIT = (re.compile(r"(^|/)phalanx/parallel/clock\.py$"), "wait_for_peers")  # stands around `Work.wait`


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is. num_phases: entered so far. since_s: when it entered this one. deadline_s: for it; None: no
    limit. met_s: when the last rank that was less far came as far as this one, while it was in this phase. num_samples:
    from how many of its like the deadline was learned; 0: it is the fixed one.
    """

    rank: int
    step: int = -1
    num_phases: int = 0
    name: str = "start"
    since_s: float = 0.0
    deadline_s: float | None = None
    met_s: float = 0.0
    num_samples: int = 0
    ended: bool = False

    @property
    def distance(self) -> tuple[int, int]:
        return (self.step, self.num_phases)

    def is_over(self, now_s: float) -> bool:
        """Whether the phase's own time is used up."""
        return self.deadline_s is not None and self.own_time_s(now_s) > self.deadline_s

    def own_time_s(self, now_s: float) -> float:
        """How long it has been in its phase without waiting for a rank less far."""
        return now_s - max(self.since_s, self.met_s)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def advance(progress: Progress, event: Event) -> Progress:
    """The progress of a rank after one of its events. A phase without a step keeps the step before it."""
    if event.kind in ("exit", "error"):
        return replace(progress, ended=True)
    if event.kind not in ("entry", "phase"):
        return progress
    step, deadline_s = event.fields.get("step"), event.fields.get("deadline_s")
    return replace(
        progress,
        step=progress.step if step is None else int(step),
        num_phases=progress.num_phases + 1,
        name=str(event.fields.get("name", "import")),
        since_s=event.time_monotonic_s,
        deadline_s=None if deadline_s is None else float(deadline_s),
        num_samples=0,
    )


def observed(progress: Mapping[int, Progress], event: Event) -> dict[int, Progress]:
    """The progress of all ranks after an event: for those that waited for its rank, their own time begins with it."""
    if event.rank is None:
        return dict(progress)
    before, after = progress[event.rank], advance(progress[event.rank], event)
    met = {
        rank: replace(at, met_s=event.time_monotonic_s)
        for rank, at in progress.items()
        if before.distance < at.distance <= after.distance
    }
    return {**progress, **met, event.rank: after}


def late_ranks(progress: Mapping[int, Progress], now_s: float) -> tuple[int, ...]:
    """The living ranks that are past their own deadline at monotonic time `now_s`, and wait for no rank that is less
    far and within its own. A rank without a deadline excuses nobody.
    """
    living = [at for _, at in sorted(progress.items()) if not at.ended]
    within = [at.distance for at in living if at.deadline_s is not None and not at.is_over(now_s)]
    return tuple(at.rank for at in living if at.is_over(now_s) and not any(each < at.distance for each in within))


def main_stack(dump: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first, of the last dump that faulthandler wrote (it lists the main thread
    last).
    """
    frames: list[Frame] = []
    for line in dump.splitlines():
        if match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
        elif line.startswith(("Thread ", "Current thread ")):
            frames = []
    return tuple(frames)


def waits_in_collective(stack: Sequence[Frame]) -> bool:
    """Whether the innermost frames belong to torch, and one of them to torch.distributed: a user's function on top says
    no. Or the innermost is where the step's clock measures a wait for others.
    """
    file, name = _TIMED_WAIT
    if stack and stack[0].name == name and file.search(stack[0].file):
        return True
    for frame in stack:
        if not _TORCH.search(frame.file):
            return False
        if _COLLECTIVE.search(frame.file):
            return True
    return False


def culprit(progress: Mapping[int, Progress], stacks: Mapping[int, str]) -> int:
    """The rank that the others wait for, among those that live."""
    living = [at for _, at in sorted(progress.items()) if not at.ended]
    least = min(at.distance for at in living)
    behind = [at.rank for at in living if at.distance == least]
    free = [rank for rank in behind if rank in stacks and not waits_in_collective(main_stack(stacks[rank]))]
    mute = [rank for rank in behind if rank not in stacks]
    return (free or mute or behind)[0]


class Watch:
    """Holds the progress of the ranks of one gang that live on this host.

    ranks: those, None for the whole world. off: no deadline counts (a debugger is at work). rule: how deadlines are
    learned; None: they are not. past: durations of the job's earlier attempts, by section.
    """

    def __init__(
        self,
        world_size: int,
        *,
        ranks: Collection[int] | None = None,
        off: bool = False,
        rule: Rule | None = None,
        past: Mapping[str, Durations] | None = None,
    ) -> None:
        self.off, self._rule = off, rule
        self._is_whole = ranks is None or len(ranks) == world_size
        self._progress = {rank: Progress(rank) for rank in (range(world_size) if ranks is None else ranks)}
        self._past = dict(past or {})
        self._longest_s = 0.0

    @property
    def past(self) -> Mapping[str, Durations]:
        """The durations of the sections that ended, for the next attempt's watch."""
        return self._past

    def observe(self, event: Event) -> None:
        if event.kind in ("entry", "phase") and event.rank is not None:
            self._learn(self._progress[event.rank], event.time_monotonic_s)
        self._progress = observed(self._progress, event)
        if event.kind in ("entry", "phase") and event.rank is not None:
            self._allow(self._progress[event.rank])

    def _learn(self, before: Progress, now_s: float) -> None:
        """Takes the duration of the section that ends."""
        if self._rule is not None and before.name in self._rule.learned:
            self._past[before.name] = self._past.get(before.name, Durations()).plus(before.own_time_s(now_s))

    def _allow(self, at: Progress) -> None:
        """Sets the deadline of the section that begins."""
        self._longest_s = max(self._longest_s, at.deadline_s or 0.0)
        if self._rule is not None:
            allowed = allowance(self._rule, at.name, self._past.get(at.name, Durations()), at.deadline_s)
            self._progress[at.rank] = replace(at, deadline_s=allowed.limit_s, num_samples=allowed.num_samples)

    def late(self, now_s: float) -> tuple[int, ...]:
        return () if self.off else late_ranks(self._progress, now_s)

    def verdict(self, now_s: float, stacks: Mapping[int, str]) -> Cause | None:
        """The hang of ranks that are late; None where they may wait for a rank of another host that is still honest."""
        if not self.late(now_s):
            return None
        cause = self.cause(now_s, stacks)
        assert cause.rank is not None
        at = self._progress[cause.rank]
        patience_s = (at.deadline_s or 0.0) + self._longest_s
        return None if cause.is_waiting and at.own_time_s(now_s) <= patience_s else cause

    def cause(self, now_s: float, stacks: Mapping[int, str]) -> Cause:
        """The hang told: who, in which phase, since when, where. now_s: monotonic. stacks: of the living ranks, as
        `Gang.stacks`.
        """
        at = self._progress[culprit(self._progress, stacks)]
        whole_stack = main_stack(stacks.get(at.rank, ""))
        stack = whole_stack[:NUM_TOP_FRAMES]
        learned = f", learned from {at.num_samples} like it" if at.num_samples else ""
        limit = "" if at.deadline_s is None else f" (its deadline: {round(at.deadline_s, 2):g} s{learned})"
        return Cause(
            "hang",
            at.rank,
            f"in phase {at.name!r} of step {at.step} for {now_s - at.since_s:.1f} s{limit}",
            where=str(stack[0]) if stack else "no stack: the rank does not answer",
            detail="\n".join(map(str, stack)),
            is_waiting=not self._is_whole and waits_in_collective(whole_stack),
        )
