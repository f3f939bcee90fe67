"""From causes to remedies, and how often."""

from __future__ import annotations

import pytest

from phalanx.api.agent.v1 import record_pb2
from phalanx.lineage.events import Cause
from phalanx.train.recovery import (
    LONGEST_BACKOFF_S,
    REMEDIES,
    Remedy,
    backoff_s,
    budget_after,
    is_exhausted,
    remedy_of,
)

KINDS = [name.removeprefix("CAUSE_KIND_").lower() for name in record_pb2.CauseKind.keys()][1:]  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_cause_of_the_contract_has_a_remedy(kind: str) -> None:
    assert kind in REMEDIES
    assert remedy_of(Cause(kind)) is REMEDIES[kind]


def test_user_error_and_a_newer_attempt_are_never_retried() -> None:
    assert {kind for kind, remedy in REMEDIES.items() if remedy is Remedy.GIVE_UP} == {"user_error", "superseded"}


def test_cause_that_is_unknown_is_retried_in_place() -> None:
    assert remedy_of(Cause("moonquake")) is Remedy.IN_PLACE


@pytest.mark.parametrize(
    ("spent", "began", "progressed", "then"),
    [(0, True, False, 1), (2, True, False, 3), (2, True, True, 0), (2, False, False, 2), (0, False, True, 0)],
)
def test_budget_counts_attempts_that_began_without_progress(
    spent: int, began: bool, progressed: bool, then: int
) -> None:
    assert budget_after(spent, began=began, progressed=progressed) == then


@pytest.mark.parametrize(("spent", "limit", "is_over"), [(0, 3, False), (2, 3, False), (3, 3, True), (1, 1, True)])
def test_budget_is_exhausted_at_its_limit(spent: int, limit: int, is_over: bool) -> None:
    assert is_exhausted(spent, limit) is is_over


def test_backoff_starts_at_once_and_grows_to_its_bound() -> None:
    pauses = [backoff_s(number) for number in range(40)]
    assert pauses[:5] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_BACKOFF_S
