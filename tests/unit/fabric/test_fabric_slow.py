"""The rule by which slow pairs are named."""

from __future__ import annotations

import itertools
import random

import pytest

from phalanx.fabric.slow import SHARED_FACTOR, judge

Pairs = dict[tuple[int, int], float]


def healthy(num_ranks: int, seed: int = 0, spread: float = 0.2) -> Pairs:
    rng = random.Random(seed)
    return {pair: 30e-6 * rng.uniform(1, 1 + spread) for pair in itertools.combinations(range(num_ranks), 2)}


@pytest.mark.parametrize("num_ranks", range(3, 13))
@pytest.mark.parametrize("seed", range(5))
def test_of_healthy_pairs_none_is_named(num_ranks: int, seed: int) -> None:
    verdict = judge(healthy(num_ranks, seed))
    assert verdict.pairs == () and verdict.ranks == ()
    assert min(healthy(num_ranks, seed).values()) <= verdict.reference < verdict.limit


@pytest.mark.parametrize("num_ranks", range(3, 13))
def test_each_slow_pair_is_named_and_no_other(num_ranks: int) -> None:
    for pair in healthy(num_ranks):
        verdict = judge({**healthy(num_ranks), pair: 100e-6})
        assert verdict.pairs == (pair,) and verdict.ranks == ()


@pytest.mark.parametrize("num_ranks", range(4, 13))
def test_two_slow_pairs_are_both_named(num_ranks: int) -> None:
    verdict = judge({**healthy(num_ranks), (0, 1): 200e-6, (1, 3): 90e-6})
    assert verdict.pairs == ((0, 1), (1, 3)) and verdict.ranks == ()


@pytest.mark.parametrize("num_ranks", range(3, 13))
def test_rank_whose_pairs_are_all_slow_is_named_instead_of_them(num_ranks: int) -> None:
    for rank in range(num_ranks):
        figures = {pair: value * (10 if rank in pair else 1) for pair, value in healthy(num_ranks).items()}
        verdict = judge(figures)
        assert verdict.ranks == (rank,) and verdict.pairs == ()


def test_slow_pair_beside_a_slow_rank_is_named_too() -> None:
    figures = {pair: value * (10 if 5 in pair else 1) for pair, value in healthy(8).items()}
    verdict = judge({**figures, (0, 2): 400e-6})
    assert verdict.ranks == (5,) and verdict.pairs == ((0, 2),)


def two_sockets(num_ranks: int) -> Pairs:
    """Pairs of one half of the ranks with the other take four times as long."""
    half = num_ranks // 2
    return {pair: value * (4 if pair[0] < half <= pair[1] else 1) for pair, value in healthy(num_ranks).items()}


@pytest.mark.parametrize("num_ranks", [4, 6, 8, 12])
def test_another_kind_of_link_is_no_exception(num_ranks: int) -> None:
    assert judge(two_sockets(num_ranks)).pairs == () and judge(two_sockets(num_ranks)).ranks == ()


@pytest.mark.parametrize("num_ranks", [6, 8, 12])
def test_slow_pair_of_another_kind_of_link_is_named_among_its_like(num_ranks: int) -> None:
    pair = (1, num_ranks - 1)
    assert judge({**two_sockets(num_ranks), pair: 1e-3}).pairs == (pair,)
    assert judge({**two_sockets(num_ranks), (0, 1): 1e-3}).pairs == ((0, 1),)


def test_wide_spread_among_good_pairs_raises_the_limit() -> None:
    pairs = list(itertools.combinations(range(8), 2))
    noisy = {pair: 30e-6 * (1 + 1.5 * index / len(pairs)) for index, pair in enumerate(pairs)}
    assert judge(noisy).pairs == () and max(noisy.values()) > 1.7 * judge(noisy).reference
    assert judge({**noisy, (2, 6): 2e-3}).pairs == ((2, 6),)


def test_ranks_that_share_processors_may_differ_more() -> None:
    figures = {**healthy(6, spread=0.0), (1, 4): 75e-6}
    assert judge(figures).pairs == ((1, 4),) and judge(figures, SHARED_FACTOR).pairs == ()
    assert judge({**figures, (1, 4): 100e-6}, SHARED_FACTOR).pairs == ((1, 4),)


def test_two_ranks_have_nothing_to_be_compared_with() -> None:
    assert judge({(0, 1): 1.0}).pairs == ()


def test_unit_of_the_figures_does_not_matter() -> None:
    figures = {**healthy(6), (1, 4): 1e-3}
    assert judge({pair: value * 1e6 for pair, value in figures.items()}).pairs == judge(figures).pairs == ((1, 4),)
