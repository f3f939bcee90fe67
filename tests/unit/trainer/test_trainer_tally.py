"""What the events of a run add up to."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.gang import Event
from phalanx.trainer.tally import Tally


def tally_of(*events: tuple[int | None, str, dict[str, Any], float]) -> Tally:
    """The fold over (rank, kind, fields, seconds)."""
    tally = Tally()
    for event in events:
        tally.observe(Event(*event))
    return tally


def progress(step: int, loss: float | None, time_s: float) -> tuple[int, str, dict[str, Any], float]:
    """Rank 0's word of one step of 256 tokens in half a second."""
    fields = {"step": step, "loss": loss, "tokens": 256, "step_time_s": 0.5, "data_wait_s": 0.1}
    return (0, "progress", fields, time_s)


def opened(rank: int, attempt: int, step: int, time_s: float = 0.0) -> tuple[int, str, dict[str, Any], float]:
    """A rank's word that its attempt opened."""
    return (rank, "opened", {"attempt": attempt, "step": step}, time_s)


def test_tally_of_a_plain_run_counts_steps_losses_tokens_and_checkpoints() -> None:
    tally = tally_of(
        opened(0, 1, 0),
        opened(1, 1, 0),
        progress(1, 6.0, 1.0),
        progress(2, 5.0, 2.0),
        (0, "committed", {"attempt": 1, "step": 2}, 2.5),
        (0, "evaluation", {"step": 2, "loss": 5.5}, 2.6),
        (0, "exit", {"exit_code": 0}, 3.0),
        (1, "exit", {"exit_code": 0}, 3.0),
    )
    assert (tally.step, tally.first_loss, tally.final_loss, tally.eval_loss) == (2, 6.0, 5.0, 5.5)
    assert (tally.tokens, tally.attempts, tally.checkpoints, tally.steps_redone) == (512, [1], 1, 0)
    assert tally.tokens_per_second == pytest.approx(512.0)
    assert tally.losses == {1: 6.0, 2: 5.0} and tally.recoveries_s == [] and tally.incidents == []


def test_tally_over_a_failure_counts_redone_steps_and_the_time_to_the_next_finished_step() -> None:
    tally = tally_of(
        opened(0, 1, 0),
        *(progress(step, 6.0, float(step)) for step in (1, 2, 3)),
        (1, "exit", {"exit_code": None, "signal": 9}, 10.0),
        (0, "error", {}, 10.5),
        (0, "exit", {"exit_code": 1}, 11.0),
        (None, "incident", {"kind": "process_death", "rank": 1, "message": "killed by SIGKILL"}, 11.1),
        opened(0, 2, 2),
        progress(3, 5.9, 14.0),
        progress(4, 5.8, 15.0),
    )
    assert tally.steps_redone == 1 and tally.attempts == [1, 2] and tally.step == 4
    assert tally.recoveries_s == [4.0]
    assert tally.incidents == ["process_death of rank 1: killed by SIGKILL"]
    assert tally.losses[3] == 5.9


def test_tally_of_a_non_finite_step_keeps_the_last_finite_loss_and_counts_rank_0_once() -> None:
    tally = tally_of(
        opened(0, 1, 0),
        progress(1, 6.0, 1.0),
        (0, "non_finite", {"step": 2, "loss": "nan"}, 2.0),
        (1, "non_finite", {"step": 2, "loss": "nan"}, 2.0),
        progress(2, None, 2.0),
    )
    assert (tally.step, tally.final_loss, tally.skipped_updates, sorted(tally.losses)) == (2, 6.0, 1, [1])


def test_tally_of_an_incident_without_a_rank_names_the_gang() -> None:
    tally = tally_of(
        (None, "incident", {"kind": "process_death", "rank": None, "message": "the fork server died"}, 1.0)
    )
    assert tally.incidents == ["process_death of the gang: the fork server died"]


def test_tally_with_sparse_lines_of_progress_counts_the_tokens_of_every_step() -> None:
    tally = tally_of(opened(0, 1, 4), progress(10, 6.0, 1.0), (0, "stopped", {"step": 13}, 2.0))
    assert tally.tokens == 9 * 256 and tally.step == 13
    assert tally.tokens_per_second == pytest.approx(512.0)


def test_tally_before_any_step_has_no_rate() -> None:
    assert tally_of(opened(0, 3, 7)).tokens_per_second is None
    assert tally_of(opened(0, 3, 7)).step == 7
