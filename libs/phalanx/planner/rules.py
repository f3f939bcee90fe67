"""The field's rules of thumb for large runs, and what a plan says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.planner.cost import RunCost, dollars, run_cost, tokens_per_s_at
from phalanx.planner.prices import Prices
from phalanx.planner.reliability import rates_for


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as people say it; each figure from lowest to highest. usd: an open end is infinite. gpu_failures,
    network_failures: within `days`; None where the rule says nothing."""

    said: str
    days: tuple[float, float]
    usd: tuple[float, float]
    gpu_failures: tuple[float, float] | None = None
    network_failures: tuple[float, float] | None = None


RULES: tuple[Rule, ...] = (
    Rule("7B on 64 A100: 1 week, $25K", (7, 7), (25e3, 25e3)),
    Rule("70B on 512 A100: 2 weeks, $500K", (14, 14), (500e3, 500e3)),
    Rule(
        "405B on 4,096 H100 and 10T tokens: 50 days, $10M, 5-10 GPU and 2-5 network failures",
        (50, 50),
        (10e6, 10e6),
        gpu_failures=(5, 10),
        network_failures=(2, 5),
    ),
    Rule("1T and more on 8,192 H100: 3-6 months, $50M and more", (91, 183), (50e6, float("inf"))),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a plan says of a rule.

    days_at_peak: of the same tokens if every GPU gave its printed peak without pause. possible: whether that is within
    the rule's days. within_two: days and dollars within a factor of 2. gpu_failures, network_failures: expected within
    the rule's days by the measured rates of the kind; None where those are not by component.
    """

    rule: Rule
    plan: RunCost
    days_at_peak: float
    gpu_failures: float | None
    network_failures: float | None

    @property
    def possible(self) -> bool:
        """Whether the GPUs' peak allows the rule."""
        return self.days_at_peak <= self.rule.days[1]

    @property
    def within_two(self) -> bool:
        """Whether days and dollars are within a factor of 2 of the rule's."""
        return _near(self.plan.wall_days, self.rule.days) and _near(self.plan.usd.middle, self.rule.usd)

    @property
    def said(self) -> str:
        """In one line."""
        plan = self.plan
        own = f"{plan.wall_days:.0f} days, {dollars(plan.usd.middle)} for {plan.tokens / 1e9:,.0f}B tokens"
        if not self.possible:
            line = f"impossible: {self.days_at_peak:.0f} days at the GPUs' peak; planned: {own}"
        else:
            line = f"{'within' if self.within_two else 'not within'} a factor of 2: {own}"
        return "; ".join([line, *self._failures()])

    def _failures(self) -> Iterator[str]:
        for name in ("gpu", "network"):
            ruled, expected = getattr(self.rule, f"{name}_failures"), getattr(self, f"{name}_failures")
            if ruled is not None and expected is not None:
                near = "within a factor of 2 of" if _near(expected, ruled) else "measured rates contradict"
                yield f"{expected:.0f} {name} failures in {self.rule.days[1]:.0f} days, {near} {ruled[0]}-{ruled[1]}"


def _near(value: float, span: tuple[float, float]) -> bool:
    return span[0] / 2 <= value <= 2 * span[1]


def judge(
    rule: Rule,
    *,
    tokens: float,
    flops_per_token: float,
    gpus: int,
    gpu: str,
    peak_tflops: float,
    tokens_per_s: float,
    prices: Prices,
    ettr: float = 1.0,
) -> Verdict:
    """A rule against a plan of the same run. flops_per_token: model operations. tokens_per_s: of the whole run."""
    plan = run_cost(tokens, tokens_per_s, gpus, gpu, prices, ettr=ettr)
    at_peak = run_cost(tokens, tokens_per_s_at(1.0, flops_per_token, gpus, peak_tflops), gpus, gpu, prices)
    counted = rates_for(gpu).expected(gpus, rule.days[1])
    by_gpu = counted["gpu"] + counted["gpu memory"] if "gpu" in counted else None
    return Verdict(rule, plan, at_peak.wall_days, by_gpu, counted.get("network"))
