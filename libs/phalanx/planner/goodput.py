"""Days of a run, drawn at random: failures, recoveries, spares, and where the time went."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx.core.errors import PhalanxError
from phalanx.planner.reliability import DAY_S, HOUR_S, FailureRates, Recovery, daly_interval_s


@dataclass(slots=True)
class Ledger:
    """Seconds of wall time by what they were spent on, and interruptions by component."""

    training_s: float = 0.0
    checkpoint_s: float = 0.0
    lost_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    restore_s: float = 0.0
    waiting_s: float = 0.0
    interruptions: Counter[str] = field(default_factory=Counter)

    @property
    def wall_s(self) -> float:
        """All of it."""
        spent = (self.checkpoint_s, self.lost_s, self.detect_s, self.restart_s, self.restore_s, self.waiting_s)
        return self.training_s + sum(spent)

    @property
    def ettr(self) -> float:
        """Effective training time: the part of wall time whose training lasts."""
        return self.training_s / self.wall_s


def draw_run(rates: FailureRates, gpus: int, days: float, recovery: Recovery, seed: int = 0) -> Ledger:
    """One run of `days` of wall time on `gpus` GPUs, drawn with `seed`; the same seed gives the same run.

    A failure throws back to the newest checkpoint that can be restored. One during detection, restart or restore begins
    the recovery again. One that takes a node waits for a spare, or with none left for the first node repaired.
    """
    if days <= 0:
        raise PhalanxError("days", value=days, expected="more than 0", remedy="give the days of the run")
    return _Run(rates, gpus, days * DAY_S, recovery, random.Random(seed)).draw()


class _Run:
    """One run while it is drawn: the clock, the ledger, the nodes under repair."""

    def __init__(self, rates: FailureRates, gpus: int, end_s: float, recovery: Recovery, dice: random.Random) -> None:
        self.recovery, self.end_s, self.dice = recovery, end_s, dice
        self.mtbf_s = rates.mtbf_h(gpus) * HOUR_S
        self.components = rates.components
        self.weights = list(accumulate(rates.per_hour(each, gpus) for each in rates.components))
        self.ledger, self.clock = Ledger(), 0.0
        self.spares, self.repairs = recovery.spares, list[float]()

    def draw(self) -> Ledger:
        """The ledger of the whole run."""
        while self.clock < self.end_s:
            if self._train():
                self._recover()
        return self.ledger

    def _failure_in(self) -> float:
        return math.inf if math.isinf(self.mtbf_s) else self.dice.expovariate(1 / self.mtbf_s)

    def _train(self) -> bool:
        """Trains until a failure (True) or the end of the run."""
        up, left = self._failure_in(), self.end_s - self.clock
        fails, up = up < left, min(up, left)
        plan = self.recovery
        cycle = plan.interval_s + plan.checkpoint_s
        if fails:
            cycles = float(max(0, math.floor((up - plan.durable_s) / cycle)))
            self.ledger.lost_s += up - cycles * cycle
        else:
            cycles, rest = divmod(up, cycle)
            self.ledger.training_s += min(rest, plan.interval_s)
            self.ledger.checkpoint_s += max(0.0, rest - plan.interval_s)
        self.ledger.training_s += cycles * plan.interval_s
        self.ledger.checkpoint_s += cycles * plan.checkpoint_s
        self.clock += up
        return fails

    def _recover(self) -> None:
        """From a failure to training again, or to the end of the run."""
        while True:
            component = self.components[bisect(self.weights, self.dice.random() * self.weights[-1])]
            self.ledger.interruptions[component.name] += 1
            self._spend("detect_s", self.recovery.detect_s)
            if component.takes_node and self.spares is not None:
                self._spend("waiting_s", self._take_spare())
            fails_in = self._failure_in()
            for phase in ("restart_s", "restore_s"):
                needed = getattr(self.recovery, phase)
                self._spend(phase, min(needed, fails_in))
                fails_in -= needed
                if fails_in < 0:
                    break
            if fails_in >= 0 or self.clock >= self.end_s:
                return

    def _spend(self, phase: str, seconds: float) -> None:
        seconds = min(seconds, max(0.0, self.end_s - self.clock))
        setattr(self.ledger, phase, getattr(self.ledger, phase) + seconds)
        self.clock += seconds

    def _take_spare(self) -> float:
        """Seconds until a node takes the place of the one that failed, which goes to repair."""
        assert self.spares is not None
        mean = self.recovery.repair_s
        heapq.heappush(self.repairs, self.clock + (self.dice.expovariate(1 / mean) if mean else 0.0))
        while self.repairs and self.repairs[0] <= self.clock:
            heapq.heappop(self.repairs)
            self.spares += 1
        if self.spares:
            self.spares -= 1
            return 0.0
        return heapq.heappop(self.repairs) - self.clock


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over many runs: its mean, and what nine of ten lie between."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        edge = (len(ordered) - 1) // 20
        return cls(sum(ordered) / len(ordered), ordered[edge], ordered[-1 - edge])


@dataclass(frozen=True, slots=True)
class Outlook:
    """What runs of one plan come to: effective training time, interruptions, and the mean of the ledgers' seconds."""

    ettr: Spread
    interruptions: Spread
    by_component: dict[str, float]


def outlook(
    rates: FailureRates, gpus: int, days: float, recovery: Recovery, *, runs: int = 100, seed: int = 0
) -> Outlook:
    """`runs` runs, each drawn on its own."""
    drawn = [draw_run(rates, gpus, days, recovery, seed * 1_000_003 + number) for number in range(runs)]
    counts: Counter[str] = sum((ledger.interruptions for ledger in drawn), Counter())
    return Outlook(
        Spread.of([ledger.ettr for ledger in drawn]),
        Spread.of([float(ledger.interruptions.total()) for ledger in drawn]),
        {each.name: counts[each.name] / runs for each in rates.components},
    )


def drawn_interval_s(recovery: Recovery, mtbf_s: float, *, failures: int = 5_000, seed: int = 0) -> float:
    """The interval of the most training by simulation alone, which the closed formulas can be held against.

    Draws `failures` times between failures, one from each of as many equally likely stretches, and asks of intervals
    from a fifth to five times Daly's, in 65 even ratios, how much of those times they keep; the peak of a parabola
    through the best and its neighbours at a distance.
    """
    dice = random.Random(seed)
    ups = [-mtbf_s * math.log(1 - (number + dice.random()) / failures) for number in range(failures)]
    centre = daly_interval_s(max(recovery.checkpoint_s, 1e-3), mtbf_s)
    ratio, reach = math.exp(math.log(5) / 32), 6
    intervals = [centre * ratio**step for step in range(-32, 33)]
    kept = [_kept_s(ups, interval, recovery) for interval in intervals]
    best = max(range(reach, len(kept) - reach), key=kept.__getitem__)
    before, at, after = kept[best - reach], kept[best], kept[best + reach]
    bend = before - 2 * at + after
    shift = 0.0 if bend >= 0 else reach * (before - after) / (2 * bend)
    return intervals[best] * math.pow(ratio, shift)


def _kept_s(ups: Sequence[float], interval_s: float, recovery: Recovery) -> float:
    """Training that outlasts the failures which end `ups`."""
    cycle = interval_s + recovery.checkpoint_s
    return interval_s * sum(max(0, int((up - recovery.durable_s) // cycle)) for up in ups)
