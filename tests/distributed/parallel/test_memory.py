"""What ranks allocate, beside what the planner says: counted bytes of tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.gang.fork_server import ForkServer

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.planner.memory import CASES, Compared, allocated, planned_bytes

pytestmark = pytest.mark.distributed
NAMES = (
    "dp 2, zero 1",
    "dp 2, zero 3",
    "dp 2, zero 3, recompute",
    "large vocabulary",
    "tp 2",
    "cp 2",
    "ep 2, zero 3",
    "pp 2, 1f1b",
    "pp 2, zbv",
    "pp 2, zero bubble, recompute",
)
BOUND = 0.10


@pytest.fixture(scope="module")
def peaks(fork_server: ForkServer) -> dict[str, list[tuple[int, int]]]:
    """Of each case every rank's place in the pipeline and its peak."""
    return allocated(fork_server, NAMES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_planned_memory_of_every_rank_is_within_a_tenth_of_what_it_allocates(
    name: str, peaks: dict[str, list[tuple[int, int]]]
) -> None:
    found = Compared.of(CASES[name], peaks[name])
    assert abs(found.off) < BOUND, f"{found.allocated:,} bytes allocated, {found.planned:,} planned: {found.off:+.1%}"


def test_rank_that_allocates_more_than_planned_is_seen() -> None:
    case = CASES["dp 2, zero 3"]
    (planned,) = planned_bytes(case)
    assert Compared.of(case, [(0, planned), (0, planned * 5 // 4)]).off == pytest.approx(-0.2, abs=1e-4)
