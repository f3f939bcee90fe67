"""How often a run of N GPUs is interrupted, how often it should save, and how much of its time is training.

Failures of independent parts in series: rates add, so the mean time between interruptions falls as 1 / N. Measured
tables: Grattafiori et al. 2024 (arXiv 2407.21783, section 3.3.4, table 5: every unexpected interruption of 54 days on
16,384 H100) and Kokolis et al. 2025 (arXiv 2410.21680, section III: two A100 clusters as one rate a node, which is
right for jobs of thousands of GPUs and 3.6 times too hopeful for one of 1,024, whose interruptions are not its nodes').
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from phalanx.core.errors import PhalanxError

HOUR_S, DAY_S = 3600.0, 86_400.0
Per = Literal["gpu", "node"]


@dataclass(frozen=True, slots=True)
class Component:
    """A kind of failure. per_million_hours: of one unit. per: what it is counted on. takes_node: whether the node must
    be replaced before the run goes on."""

    name: str
    per: Per
    per_million_hours: float
    takes_node: bool = True


@dataclass(frozen=True, slots=True)
class FailureRates:
    """The parts of a cluster that end a run when they fail."""

    components: tuple[Component, ...]
    gpus_per_node: int = 8

    def per_hour(self, component: Component, gpus: int) -> float:
        """Interruptions an hour by one component, for a run of `gpus`."""
        units = gpus if component.per == "gpu" else math.ceil(gpus / self.gpus_per_node)
        return component.per_million_hours * units / 1e6

    def mtbf_h(self, gpus: int) -> float:
        """Mean hours between interruptions of a run of `gpus`. Raises PhalanxError where there is none to count."""
        if gpus < 1:
            raise PhalanxError("gpus", value=gpus, expected="at least 1", remedy="give the size of the run")
        total = sum(self.per_hour(component, gpus) for component in self.components)
        return math.inf if total == 0 else 1.0 / total

    def expected(self, gpus: int, days: float) -> dict[str, float]:
        """Interruptions by component that a run of `gpus` meets in `days` of wall time, on average."""
        return {each.name: self.per_hour(each, gpus) * 24 * days for each in self.components}

    def node_share(self, gpus: int) -> float:
        """The part of interruptions that take a node away."""
        taking = sum(self.per_hour(each, gpus) for each in self.components if each.takes_node)
        return taking / sum(self.per_hour(each, gpus) for each in self.components)


def one_node_rate(failures_per_thousand_node_days: float, gpus_per_node: int = 8) -> FailureRates:
    """Rates where only a total is known, as clusters publish it."""
    return FailureRates((Component("node", "node", failures_per_thousand_node_days * 1e3 / 24),), gpus_per_node)


def _counted() -> FailureRates:
    """Table 5 as rates: counts over 54 days of 16,384 GPUs in 2,048 nodes.

    Networks, GPUs and their memories count by GPU, hosts by node. Software counts by node too: it was not measured at
    another size. A software fault leaves its node in the run.
    """
    gpu_hours = 16_384 * 54 * 24
    by_gpu = {
        "gpu": 148 + 17 + 6 + 6,  # faulty, system processor, thermal sensor, silent corruption
        "gpu memory": 72 + 19,
        "network": 35,
        "nic": 7,
    }
    by_node = {"host": 32 + 3 + 3 + 2 + 2 + 2 + 2}
    software = {"software": 54 + 7 + 2}
    return FailureRates(
        (
            *(Component(name, "gpu", count / gpu_hours * 1e6) for name, count in by_gpu.items()),
            *(Component(name, "node", count / gpu_hours * 8e6) for name, count in by_node.items()),
            *(Component(name, "node", count / gpu_hours * 8e6, takes_node=False) for name, count in software.items()),
        )
    )


H100_RATES = _counted()
A100_RATES = one_node_rate(6.50)
A100_QUIET_RATES = one_node_rate(2.34)
RATES: Mapping[str, FailureRates] = MappingProxyType({"A100": A100_RATES, "H100": H100_RATES})
DEFAULT_RATES = H100_RATES


def rates_for(gpu: str) -> FailureRates:
    """Rates of a kind of GPU by its name (A100-80, H100, ...); those of the H100 where nobody has published any."""
    return RATES.get(_kind(gpu), DEFAULT_RATES)


def has_rates(gpu: str) -> bool:
    """Whether a kind's own rates have been published."""
    return _kind(gpu) in RATES


def _kind(gpu: str) -> str:
    return gpu.split("-")[0].upper()


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints: sqrt(2 C M) (Young 1974)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Young's with two terms more (Daly 2006, equation 37): for C < 2 M, else M."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The interval t of the most training time under exponential failures: 1 - exp(-(t + C) / M) = t / M (the minimum
    of Daly's complete model, 2006, equation 20), by Newton's method. Depends neither on restart nor on detection."""
    if checkpoint_s <= 0:
        return 0.0
    part = min(1.0, daly_interval_s(checkpoint_s, mtbf_s) / mtbf_s)
    for _ in range(60):
        survives = math.exp(-part - checkpoint_s / mtbf_s)
        step = (1 - survives - part) / (survives - 1)
        part -= step
        if abs(step) < 1e-13:
            break
    return part * mtbf_s


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a run saves and comes back; seconds.

    interval_s: training between checkpoints. checkpoint_s: how long training stands still for one. durable_s: from
    there until it can be restored, while training goes on. detect_s: from a failure until it is known. restart_s: a
    new gang, up to its first collective. restore_s: reading the checkpoint. spares: nodes that wait; repair_s: mean
    time until a failed node is back, for which a run without spares waits.
    """

    interval_s: float
    checkpoint_s: float
    durable_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    restore_s: float = 0.0
    spares: int | None = None
    repair_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises PhalanxError for times that can't be."""
        seconds = (self.checkpoint_s, self.durable_s, self.detect_s, self.restart_s, self.restore_s, self.repair_s)
        if self.interval_s <= 0 or min(seconds) < 0 or (self.spares or 0) < 0:
            raise PhalanxError(
                "recovery",
                value=self.interval_s if self.interval_s <= 0 else min(seconds),
                expected="an interval above 0 s, no time below 0 s and no number of spares below 0",
                remedy="correct the times",
            )

    @property
    def down_s(self) -> float:
        """From a failure to training again, if nothing fails meanwhile and a node is there."""
        return self.detect_s + self.restart_s + self.restore_s


def expected_ettr(recovery: Recovery, mtbf_s: float) -> float:
    """The part of wall time that is training which lasts, exactly, under exponential failures and with spares enough.

    Between failures a run keeps t exp(-d / M) q / (1 - q) of training, q = exp(-(t + C) / M), d the time until a
    checkpoint can be restored; a failure costs its detection, and restart and restore R until one passes undisturbed:
    (M + detect) (exp(R / M) - 1) (a renewal argument, as Daly 2006, section 3).
    """
    if math.isinf(mtbf_s):
        return recovery.interval_s / (recovery.interval_s + recovery.checkpoint_s)
    cycle = (recovery.interval_s + recovery.checkpoint_s) / mtbf_s
    # Negative exponents alone, which end at 0 where positive ones overflow: 1 / expm1(x) is exp(-x) / -expm1(-x).
    downs = (recovery.durable_s + recovery.restart_s + recovery.restore_s) / mtbf_s
    kept = recovery.interval_s * math.exp(-downs - cycle) / -math.expm1(-cycle)
    return kept / (mtbf_s + recovery.detect_s)


def first_order_ettr(
    nodes: int, failures_per_node_day: float, *, restart_s: float, interval_s: float, checkpoint_s: float = 0.0
) -> float:
    """(1 - N r (u + t / 2)) / (1 + w / t): the estimate of Kokolis et al. 2025 (section III), good while losses are
    small; 0 where it would be negative. restart_s: u, from failure to training. checkpoint_s: w, training stands
    still."""
    lost = nodes * failures_per_node_day / DAY_S * (restart_s + interval_s / 2)
    return max(0.0, 1.0 - lost) / (1.0 + checkpoint_s / interval_s)
