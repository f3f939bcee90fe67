"""Pauses between tries: exponential, with full jitter, so that a thousand clients do not come back at once."""

from __future__ import annotations

import random

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def pause_s(number: int, draw: random.Random | None = None, longest_s: float = LONGEST_PAUSE_S) -> float:
    """Seconds before try `number` + 1 (the first try is number 0): uniform from 0 to a bound that doubles each time."""
    bound_s = min(longest_s, FIRST_PAUSE_S * 2.0 ** min(number, 30))
    return (draw or random).uniform(0, bound_s)
