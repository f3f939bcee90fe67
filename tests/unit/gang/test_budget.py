"""Budgets count attempts without progress."""

import pytest

from phalanx.gang.budget import Budget
from phalanx.gang.cause import Cause


def cause(kind="process_death"):
    return Cause(kind, 0, "x")


def test_budget_attempts_without_progress_end_it():
    budget = Budget(3)
    allowed = []
    for _ in range(3):
        budget = budget.after(committed=False)
        allowed.append(budget.allows_after(cause()))
    assert allowed == [True, True, False]


def test_budget_progress_restores_it():
    budget = Budget(2).after(committed=False).after(committed=True)
    assert budget.spent == 0 and budget.allows_after(cause())


@pytest.mark.parametrize("kind", ["user_error", "interrupted"])
def test_budget_never_retries_what_retrying_cannot_mend(kind):
    assert not Budget(3).after(committed=True).allows_after(cause(kind))


@pytest.mark.parametrize("kind", ["process_death", "error", "hang", "out_of_memory", "storage", "lost_peer"])
def test_budget_retries_every_other_cause(kind):
    assert Budget(3).after(committed=False).allows_after(cause(kind))
