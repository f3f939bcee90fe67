"""How many windows each source of a mixture gets in each period: whole numbers for exact weights; pure.

A period of n windows gives source i either the floor or the ceiling of weight_i x n, and n in all: systematic sampling
(Madow 1949) of the fractions that are left over. Its starting points walk round the circle of the weights' common
denominator by about the golden ratio, so that no source falls behind over many periods either; what all periods before
one gave is a closed form, the sum of floors of a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm

_STEPS_TRIED = 64
_GOLDEN = Fraction(618_033_988_749_894_848, 10**18)


def normalised(weights: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The weights, none below 0 and not all 0, as parts of their sum."""
    total = sum(weights)
    assert total > 0 and min(weights) >= 0
    return tuple(Fraction(weight) / total for weight in weights)


class Apportionment:
    """Counts of windows by source, for weights that sum to 1 and periods of `period` windows."""

    def __init__(self, weights: Sequence[Fraction], period: int) -> None:
        assert sum(weights) == 1 and period > 0
        self.period = period
        self._circle = lcm(*(weight.denominator for weight in weights))
        shares = [int(weight * self._circle) * period for weight in weights]
        self._whole = [share // self._circle for share in shares]
        self._bounds = (0, *accumulate(share % self._circle for share in shares))
        self._step = _even_step(self._circle)

    def before(self, number: int) -> tuple[int, ...]:
        """Windows of each source in the periods 0 .. number - 1."""
        lines = [floor_sum(number, self._circle, self._step, bound) for bound in self._bounds]
        return tuple(
            number * whole + upper - lower
            for whole, lower, upper in zip(self._whole, lines[:-1], lines[1:], strict=True)
        )

    def within(self, number: int) -> tuple[int, ...]:
        """Windows of each source in period `number`."""
        start = number * self._step % self._circle
        floors = [(bound + start) // self._circle for bound in self._bounds]
        return tuple(
            whole + upper - lower for whole, lower, upper in zip(self._whole, floors[:-1], floors[1:], strict=True)
        )


def floor_sum(count: int, divisor: int, slope: int, offset: int) -> int:
    """Sum of floor((slope i + offset) / divisor) for i = 0 .. count - 1; none of them negative. By exchanging the axes
    as Euclid's algorithm does (Graham, Knuth, Patashnik: Concrete Mathematics, section 3.5), so in logarithmic time.
    """
    total = 0
    while count > 0:
        total += slope // divisor * (count * (count - 1) // 2) + offset // divisor * count
        slope, offset = slope % divisor, offset % divisor
        reached = slope * count + offset
        count, offset = divmod(reached, divisor)
        divisor, slope = slope, divisor
    return total


def _even_step(circle: int) -> int:
    """A step near the golden ratio of the circle that meets every point of it, and meets them evenly from the
    beginning: of some, that with the smallest partial quotients in its continued fraction, whose sum bounds how uneven
    multiples of it are (Kuipers, Niederreiter: Uniform Distribution of Sequences, chapter 2, theorem 3.4).
    """
    first = int(circle * _GOLDEN)
    steps = [step for step in range(first, first + min(circle, _STEPS_TRIED)) if gcd(step, circle) == 1]
    return min(steps, key=lambda step: _sum_of_quotients(step, circle), default=0)


def _sum_of_quotients(above: int, below: int) -> int:
    total = 0
    while above:
        total += below // above
        above, below = below % above, above
    return total
