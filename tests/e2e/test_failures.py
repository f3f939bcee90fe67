"""What goes wrong within a run: the cause is named, the gang ends in time, the run recovers or says why it does not."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import (
    Run,
    assert_proven,
    every_manifest_holds,
    job_folder,
    lineage_of,
    newest_tensors,
    run_cli,
    run_here,
    torchrun,
    user_job,
    write_job,
)

from phalanx.gang import Event, ForkServer
from phalanx.lineage import CheckpointRef
from phalanx.lineage.plan import spans_of
from phalanx.lineage.rollback import roll_backs

NO_SAVE = ("--set", "checkpoint.interval=5")


def failure_s(run: Run) -> float:
    """From the first error or bad exit to the last rank's end, in the first gang that failed."""
    first = list(itertools.takewhile(lambda event: event.kind != "incident", run.events))
    bad = [event for event in first if event.kind == "error" or (event.kind == "exit" and event.fields["exit_code"])]
    return max(e.time_monotonic_s for e in first if e.kind == "exit") - min(e.time_monotonic_s for e in bad)


def test_raising_rank_ends_its_peers_in_time_and_is_the_cause_until_the_budget_is_spent(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    path = user_job(tmp_path, corpus, "Raises", at_call=3, on_rank=1)
    run = run_here(path, server, "checkpoint.interval=5", "recovery.max_attempts_without_progress=2")
    assert run.outcome is not None and run.outcome.state == "failed" and run.outcome.attempts == 2
    cause = run.outcome.first_cause
    assert cause is not None and (cause.kind, cause.rank) == ("error", 1)
    assert cause.message == "ValueError: the sky fell on this rank" and "in misbehave" in cause.where
    assert run.tally.attempts == [1, 2] and run.tally.step == 2
    assert failure_s(run) < 5.0
    assert [event.fields["retry"] for event in run.of("incident")] == [True, False]


def test_raising_rank_under_phalanx_run_exits_1_with_its_message(corpus: str, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Raises", at_call=3, on_rank=1)
    finished = run_cli(["run", path, "--json", "--set", "recovery.max_attempts_without_progress=1", *NO_SAVE])
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith("phalanx: tiny failed: error of rank 1: ValueError: the sky fell")
    assert "Traceback" not in finished.err
    summary = json.loads(finished.out)
    assert (summary["state"], summary["steps"], summary["attempts"]) == ("failed", 2, [1])
    assert len(summary["incidents"]) == 1 and "the sky fell" in summary["incidents"][0]


def test_raising_rank_under_torchrun_ends_the_launch_and_is_named(corpus: str, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Raises", at_call=3, on_rank=1)
    with torchrun(path) as command:
        command.wait_for("ValueError: the sky fell on this rank")
        raised_s = time.monotonic()
        finished = command.finish()
        command.wait_until_nothing_lives()
    assert finished.code == 1
    assert time.monotonic() - raised_s < 20.0  # torchrun looks at its workers, and ends them, in its own time
    every_manifest_holds(path)


def test_rank_that_raises_once_is_recovered_from(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Raises", once=True, at_call=4, on_rank=0)
    run = run_here(path, server)
    assert run.outcome is not None and run.outcome.ok and run.outcome.attempts == 2
    parent = lineage_of(path).attempts()[-1].parent
    start_step = parent.step if parent else 0  # the save of step 2 may or may not have been done when step 4 failed
    assert run.tally.steps_redone == 3 - start_step and len(run.tally.recoveries_s) == 1
    assert_proven(path, 6)


def test_user_error_in_a_rank_is_never_retried_and_exits_2(corpus: str, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "RaisesUserError", at_call=3, on_rank=1)
    finished = run_cli(["run", path, "--json"])
    assert finished.code == 2
    assert finished.err.splitlines()[-1] == "phalanx: model.args.at_call is 3: expected 0; set it to 0"
    assert json.loads(finished.out)["attempts"] == [1]
    assert "Traceback" not in finished.err


def test_rank_whose_own_code_exits_with_zero_is_no_success(corpus: str, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Exits", at_call=3, on_rank=1)
    finished = run_cli(["run", path, "--json"])
    assert finished.code == 2 and json.loads(finished.out)["attempts"] == [1]
    told = "phalanx: code of the job: expected no exit while the job runs; take it out: SystemExit: 0 ("
    last = finished.err.splitlines()[-1]
    assert last.startswith(told) and "user_models.py:" in last


def test_model_of_other_shapes_on_one_rank_is_told_before_gloo_aborts(corpus: str, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Unlike", at_call=0, on_rank=0)
    finished = run_cli(["run", path, "--json"])
    assert finished.code == 2 and json.loads(finished.out)["attempts"] == [1]
    last = finished.err.splitlines()[-1]
    assert last.startswith("phalanx: [model] class Unlike: expected the same parameters and buffers on every rank, but")
    assert "those of rank 1 have other names" in last


def test_sleeping_rank_is_found_within_its_deadline_with_its_stack_and_recovered_from(
    corpus: str, tmp_path: Path
) -> None:
    path = user_job(tmp_path, corpus, "Oversleeps", once=True, at_call=3, on_rank=1, more="[deadlines]\nstep_s = 3\n")
    finished = run_cli(["run", path, "--json"])
    assert finished.code == 0, finished.err
    summary = json.loads(finished.out)
    assert summary["attempts"] == [1, 2] and summary["steps"] == 6
    (incident,) = summary["incidents"]
    assert incident.startswith("hang of rank 1: in phase 'step' of step 3 for ")
    waited_s = float(incident.split(" for ")[1].split(" s")[0])
    assert 3.0 <= waited_s < 8.0
    assert "in doze_off" in finished.err
    assert_proven(path, 6)


def test_save_slower_than_a_step_may_be_is_waited_for(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    more = "[deadlines]\nstep_s = 3\n"
    path = user_job(tmp_path, corpus, "CommitsSlowly", at_call=8, more=more)
    run = run_here(path, server, "checkpoint.interval=1", "training.steps=3")
    assert run.outcome is not None and run.outcome.ok and run.outcome.attempts == 1, run.tally.incidents
    saved = [event.time_monotonic_s for event in run.of("committed")]
    opened = [event.time_monotonic_s for event in run.of("opened")]
    assert saved[0] - opened[0] > 8.0, "nothing was slow, so nothing is shown"
    assert_proven(path, 3)


def test_sleeping_rank_under_torchrun_is_told_with_its_stack_within_its_deadlines(corpus: str, tmp_path: Path) -> None:
    more = "[deadlines]\nstep_s = 3\nstop_grace_s = 1000\n"
    path = user_job(tmp_path, corpus, "Oversleeps", at_call=3, on_rank=1, more=more)
    with torchrun(path, "checkpoint.interval=5") as command:
        command.wait_for("progress step=2 ")
        slept_s = time.monotonic()
        command.wait_for("in doze_off")
        assert time.monotonic() - slept_s < 20.0  # 6 s: its own deadline and that of the step before
        finished = command.finish()
        command.wait_until_nothing_lives()
    assert finished.code == 1
    assert "phalanx: hang of rank 1: in phase 'step' of step 3 for " in finished.err
    for name in ("cluster.nproc", "deadlines.stop_grace_s"):
        assert f"warning: {name} has no effect, because torchrun " in finished.err


def test_non_finite_loss_is_left_out_counted_and_survived(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Overflows", at_call=3, on_rank=1)
    run = run_here(path, server)
    assert run.outcome is not None and run.outcome.ok and run.outcome.attempts == 1
    assert run.tally.skipped_updates == 1 and sorted(run.tally.losses) == [1, 2, 4, 5, 6]
    manifest = lineage_of(path).manifest(CheckpointRef(1, 6))
    assert manifest.schedule["num_updates"] == 5
    assert_proven(path, 6)


def test_non_finite_loss_stops_the_run_where_the_job_says_so(corpus: str, tmp_path: Path) -> None:
    path = user_job(tmp_path, corpus, "Overflows", at_call=3, on_rank=1)
    finished = run_cli(["run", path, "--json", "--set", 'training.non_finite="stop"'])
    assert finished.code == 2
    assert finished.err.splitlines()[-1].startswith("phalanx: step 3 is 'loss nan")
    assert json.loads(finished.out)["attempts"] == [1]


def test_steps_that_stay_non_finite_are_rolled_back_together_and_left_out(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    """Steps 4, 5 and 6 fail on one rank; at step 4 no checkpoint is taken, that of step 2 is gone back to."""
    path = user_job(tmp_path, corpus, "OverflowsFromThen", once=True, at_call=4, on_rank=1)
    run = run_here(path, server, 'recovery.on_nan="roll_back"', "training.steps=8")
    assert run.outcome is not None and run.outcome.ok and run.outcome.attempts == 2, run.outcome
    (incident,) = run.tally.incidents
    assert "steps 4 to 6 gave no finite loss and gradient" in incident
    lineage = lineage_of(path)
    first, second = lineage.attempts()
    assert second.parent == CheckpointRef(first.number, 2)
    skips = [spans_of(entry) for entry in lineage.journal(second.number) if entry.kind == "skip"]
    assert skips == [((3 * 8, 6 * 8),)]
    losses = run.tally.losses
    assert sorted(losses) == list(range(1, 9)) and losses[4] == losses[5] == losses[6] == 0.0
    assert_proven(path, 8)


def test_steps_that_are_never_finite_again_end_the_job_after_so_many_attempts(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    path = user_job(tmp_path, corpus, "OverflowsFromThen", at_call=1, on_rank=1)
    run = run_here(path, server, 'recovery.on_nan="roll_back"', "recovery.max_attempts_without_progress=2")
    assert run.outcome is not None and not run.outcome.ok and run.outcome.attempts == 2
    assert [back.first_step for back in roll_backs(lineage_of(path))] == [1, 1]


def flip(path: Path) -> None:
    """One byte in the middle becomes another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.chmod(0o644)
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "flipped byte of a tensor": ("objects/00000001-00000000.safetensors", flip),
    "deleted tensors": ("objects/00000000-00000000.safetensors", Path.unlink),
    "flipped byte of a part": ("parts/00000000.json", flip),
    "deleted part": ("parts/00000001.json", Path.unlink),
    "flipped byte of the manifest": ("manifest.json", flip),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_the_run_goes_on_from_an_older_one(
    corpus: str, server: ForkServer, tmp_path: Path, damage: str
) -> None:
    """Case 7."""
    path = write_job(tmp_path, corpus, steps=4)
    first = run_here(path, server)
    assert first.outcome is not None and first.outcome.ok
    name, harm = DAMAGES[damage]
    harm(job_folder(path) / "a00000001" / "s00000004" / name)

    run = run_here(path, server, "training.steps=6")

    assert run.outcome is not None and run.outcome.ok, run.outcome
    told = " ".join([*run.tally.incidents, *(event.fields["why"] for event in run.of("damage"))])
    assert f"a00000001/s00000004/{name}" in told
    newest = lineage_of(path).attempts()[-1]
    assert newest.parent == CheckpointRef(1, 2) and newest.number == run.tally.attempts[-1]
    assert run.outcome.attempts == (1 if name == "manifest.json" else 2)
    assert assert_proven(path, 6).steps_redone == 2
    assert newest_tensors(path)


def test_damage_reported_twice_is_remembered_by_later_runs(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=4)
    run_here(path, server)
    flip(job_folder(path) / "a00000001" / "s00000004" / "objects/00000001-00000000.safetensors")
    run_here(path, server, "training.steps=6")
    opened: list[int] = []

    def note(run: Run, event: Event) -> None:
        if event.kind == "opened" and event.rank == 0:
            opened.append(event.fields["step"])

    run = run_here(path, server, "training.steps=8", on_event=note)
    assert run.outcome is not None and run.outcome.ok and opened == [6]
    assert_proven(path, 8)
