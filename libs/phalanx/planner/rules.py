"""The field's rules of thumb for large runs, and what a plan says of them."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.cost import RunCost, run_cost, tokens_per_s_at
from phalanx.planner.prices import Prices


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as people say it. days, usd: lowest and highest; usd None: it names none."""

    said: str
    days: tuple[float, float]
    usd: tuple[float, float]


# usd of the last: "50 M and more", so its end is open.
RULES: tuple[Rule, ...] = (
    Rule("7B on 64 A100: 1 week, $25K", (7, 7), (25e3, 25e3)),
    Rule("70B on 512 A100: 2 weeks, $500K", (14, 14), (500e3, 500e3)),
    Rule("405B on 4,096 H100 and 10T tokens: 50 days, $10M", (50, 50), (10e6, 10e6)),
    Rule("1T and more on 8,192 H100: 3-6 months, $50M and more", (91, 183), (50e6, float("inf"))),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a plan says of a rule. days_at_peak: of the same tokens if every GPU gave its printed peak without pause.
    possible: whether that is within the rule's days. within_two: days and dollars within a factor of 2."""

    rule: Rule
    plan: RunCost
    days_at_peak: float
    possible: bool
    within_two: bool

    @property
    def said(self) -> str:
        """In one line."""
        plan = self.plan
        own = f"{plan.wall_days:.0f} days, ${plan.usd.middle / 1e6:.3g}M for {plan.tokens / 1e9:,.0f}B tokens"
        if not self.possible:
            return f"impossible: {self.days_at_peak:.0f} days at the GPUs' peak; planned: {own}"
        return f"{'within' if self.within_two else 'not within'} a factor of 2: {own}"


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
    fits = all(
        low / 2 <= value <= 2 * high
        for value, (low, high) in ((plan.wall_days, rule.days), (plan.usd.middle, rule.usd))
    )
    return Verdict(rule, plan, at_peak.wall_days, at_peak.wall_days <= rule.days[1], fits)
