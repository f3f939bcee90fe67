"""Days, dollars and energy of a run to a number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.planner.prices import Prices
from phalanx.planner.reliability import DAY_S

HOURS_A_DAY = 24


@dataclass(frozen=True, slots=True)
class Money:
    """US dollars at the lowest, middle and highest price of the file."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run takes. training_days: of step after step; wall_days: with interruptions and checkpoints. energy_mwh:
    GPUs, hosts and what the site adds."""

    gpus: int
    tokens: float
    training_days: float
    wall_days: float
    gpu_hours: float
    usd: Money
    energy_mwh: float


def run_cost(
    tokens: float, tokens_per_s: float, gpus: int, gpu: str, prices: Prices, *, ettr: float = 1.0, load: float = 1.0
) -> RunCost:
    """The cost of `tokens` tokens at `tokens_per_s` of the whole run.

    gpu: its kind, which the prices know. ettr: the part of wall time that is training which lasts (0 to 1). load: of a
    GPU's watts that it draws on average. Raises PhalanxError for figures that can't be, and a kind without a price.
    """
    for name, value, most in (
        ("tokens", tokens, math.inf),
        ("tokens_per_s", tokens_per_s, math.inf),
        ("gpus", gpus, math.inf),
        ("ettr", ettr, 1.0),
        ("load", load, 1.0),
    ):
        if not 0 < value <= most:
            expected = "more than 0" if math.isinf(most) else "more than 0 and at most 1"
            raise PhalanxError(name, value=value, expected=expected, remedy="correct it")
    price = prices.of(gpu)
    training_days = tokens / tokens_per_s / DAY_S
    wall_days = training_days / ettr
    gpu_hours = gpus * wall_days * HOURS_A_DAY
    low, high = price.usd_per_hour
    watts = price.watts * load * (1 + prices.site.host_watts_per_gpu_watt) * prices.site.pue
    return RunCost(
        gpus=gpus,
        tokens=tokens,
        training_days=training_days,
        wall_days=wall_days,
        gpu_hours=gpu_hours,
        usd=Money(low * gpu_hours, price.middle * gpu_hours, high * gpu_hours),
        energy_mwh=gpu_hours * watts / 1e6,
    )


def tokens_per_s_at(mfu: float, flops_per_token: float, gpus: int, peak_tflops: float) -> float:
    """Tokens a second of a run whose share of the GPUs' peak is known or assumed.

    mfu: 0 to 1. flops_per_token: model operations, in the same convention as the mfu. peak_tflops: of one GPU.
    """
    if not 0 < mfu <= 1:
        raise PhalanxError("mfu", value=mfu, expected="more than 0 and at most 1", remedy="correct it")
    return mfu * gpus * peak_tflops * 1e12 / flops_per_token


def dollars(usd: float) -> str:
    """US dollars as people say them: $1.2M, $34K, $5."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if usd >= size:
            return f"${usd / size:.3g}{unit}"
    return f"${usd:.0f}"
