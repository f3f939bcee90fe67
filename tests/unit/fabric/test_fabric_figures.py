"""Bandwidths, the line through times, and where ring and tree cross."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from phalanx.fabric.figures import algorithm_gb_s, bus_factor, crossing, fit, median, size_text, time_text

SIZES = [4**exponent for exponent in range(3, 13)]


@pytest.mark.parametrize(
    "operation, num_ranks, factor",
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_reduce_ring", 4, 1.5),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("send_recv", 8, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, num_ranks: int, factor: float) -> None:
    assert bus_factor(operation, num_ranks) == factor


def test_algorithm_bandwidth_is_size_over_time() -> None:
    assert algorithm_gb_s(4_000_000, 0.002) == pytest.approx(2.0)


def test_line_through_exact_times_is_found() -> None:
    line = fit({size: 20e-6 + size / 5e9 for size in SIZES})
    assert line.latency_s == pytest.approx(20e-6) and line.gb_s == pytest.approx(5.0) and line.error < 1e-9
    assert line.time_s(5_000_000) == pytest.approx(1.02e-3)


def test_line_through_noisy_times_is_that_of_weighted_least_squares() -> None:
    rng = random.Random(3)
    times_s = {size: (20e-6 + size / 5e9) * rng.uniform(0.8, 1.25) for size in SIZES}
    line = fit(times_s)
    time = np.array(list(times_s.values()))
    rows = np.stack([1 / time, np.array(SIZES) / time], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(SIZES)), rcond=None)[0]
    assert line.latency_s == pytest.approx(alpha, rel=1e-6) and line.s_per_byte == pytest.approx(beta, rel=1e-6)
    assert 0 < line.error < 0.4


def test_line_never_has_a_negative_part() -> None:
    falling = fit({size: 1e-3 - size * 1e-11 for size in SIZES})
    assert falling.s_per_byte == 0 and falling.gb_s is None and falling.latency_s > 0
    steep = fit({8: 1e-9, 16: 4e-9, 32: 16e-9})
    assert steep.latency_s == 0 and steep.s_per_byte > 0


def ring_and_tree(num_ranks: int, alpha: float, beta: float) -> tuple[dict[int, float], dict[int, float]]:
    levels = 2 * math.ceil(math.log2(num_ranks))
    steps = 2 * (num_ranks - 1)
    ring = {size: steps * (alpha + size / num_ranks * beta) for size in SIZES}
    tree = {size: levels * (alpha + size * beta) for size in SIZES}
    return ring, tree


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_crossing_is_where_the_models_of_ring_and_tree_meet(num_ranks: int) -> None:
    alpha, beta = 20e-6, 1 / 5e9
    found = crossing(*ring_and_tree(num_ranks, alpha, beta), num_ranks)
    levels, steps = 2 * math.log2(num_ranks), 2 * (num_ranks - 1)
    expected = alpha * (steps - levels) / (beta * (levels - steps / num_ranks))
    assert found.num_bytes == pytest.approx(expected, abs=0.5)
    assert found.said == f"the tree is faster below {size_text(found.num_bytes or 0)}, the ring above"


def test_crossing_beyond_the_sizes_is_said_to_be_foretold() -> None:
    ring, tree = ring_and_tree(8, 20e-3, 1 / 5e9)
    found = crossing(ring, tree, 8)
    assert found.num_bytes is not None and found.num_bytes > max(SIZES)
    assert found.said.endswith("(foretold: the greatest measured is 16 MiB)")


def test_where_nothing_crosses_it_is_said() -> None:
    ring, _ = ring_and_tree(4, 20e-6, 1 / 5e9)
    double = {size: 2 * time_s for size, time_s in ring.items()}
    assert crossing(ring, double, 4).said == "the ring is faster throughout: no crossing"
    assert crossing(double, ring, 4).said == "the tree is faster throughout: no crossing"
    assert crossing(ring, dict(ring), 4).said == "ring and tree take the same time at every size: no crossing"
    assert crossing(ring, double, 2).said == "with 2 ranks ring and tree send the same: no crossing"
    early = crossing({size: 1e-6 + size * 1e-9 for size in SIZES}, {size: 0.99e-6 + size * 2e-9 for size in SIZES}, 4)
    assert early.num_bytes is None and early.said == "the ring is faster at every size that was measured: no crossing"


def test_sizes_are_written_as_people_do() -> None:
    assert [size_text(size) for size in (96, 4096, 1536, 3 << 20, 2 << 30)] == [
        "96 B",
        "4 KiB",
        "1.5 KiB",
        "3 MiB",
        "2 GiB",
    ]


def test_times_are_written_as_people_do() -> None:
    assert [time_text(time_s) for time_s in (38.88e-6, 999e-6, 0.05334, 2.5, 4000.0)] == [
        "38.9 us",
        "999 us",
        "53.3 ms",
        "2.5 s",
        "4e+03 s",
    ]


def test_median_of_an_even_number_is_the_mean_of_the_middle() -> None:
    assert median([4.0, 1.0, 3.0]) == 3.0 and median([4.0, 1.0]) == 2.5
