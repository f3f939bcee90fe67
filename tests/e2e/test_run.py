"""Whole runs: to the end, stopped and continued in the same layout and in others, under `phalanx run` and torchrun."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from support.jobs import (
    PHALANX,
    Command,
    Run,
    assert_proven,
    every_manifest_holds,
    lineage_of,
    losses_of,
    newest_tensors,
    run_cli,
    run_here,
    torchrun,
    user_job,
    write_job,
)

from phalanx.gang import Event, ForkServer

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-3}
ONE_RANK = "cluster.nproc=1"
SUMMARY = {
    "state",
    "steps",
    "first_loss",
    "final_loss",
    "eval_loss",
    "tokens",
    "tokens_per_second",
    "attempts",
    "steps_redone",
    "skipped_updates",
    "checkpoints",
    "recovery_s",
    "incidents",
}


def max_relative_difference(losses: dict[int, float], reference: dict[int, float]) -> float:
    """Over the steps of `losses`, all of which the reference has."""
    return max(abs(loss - reference[step]) / abs(reference[step]) for step, loss in losses.items())


def test_run_on_two_ranks_gives_a_complete_summary_and_again_does_nothing(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=6, more="[validation]\nfreq = 3\nwindows = 8\n")
    first = run_cli(["run", path, "--json"])
    assert first.code == 0, first.err
    summary = json.loads(first.out)
    assert set(summary) == SUMMARY
    assert (summary["state"], summary["steps"], summary["attempts"]) == ("ok", 6, [1])
    assert (summary["tokens"], summary["checkpoints"], summary["steps_redone"]) == (6 * 8 * 32, 3, 0)
    assert 0 < summary["final_loss"] < summary["first_loss"] and summary["eval_loss"] < summary["first_loss"]
    assert summary["tokens_per_second"] > 0 and summary["incidents"] == [] == summary["recovery_s"]
    assert_proven(path, steps=6)
    before = sorted(file for file in tmp_path.rglob("*") if "metrics" not in file.parts)
    again = run_cli(["run", path, "--json"])
    assert again.code == 0, again.err
    assert json.loads(again.out) | {"state": "ok", "steps": 6, "tokens": 0, "attempts": []} == json.loads(again.out)
    assert sorted(file for file in tmp_path.rglob("*") if "metrics" not in file.parts) == before


def test_run_interrupted_commits_exits_130_and_resumes(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=5000, more="")
    overrides = ["--set", "checkpoint.interval=1000"]
    with Command([PHALANX, "run", path, "--json", *overrides]) as command:
        command.wait_for("step 3/")
        command.signal(signal.SIGINT)
        finished = command.finish()
        command.wait_until_nothing_lives()
    assert finished.code == 130, finished.err
    stopped_at = json.loads(finished.out)["steps"]
    assert json.loads(finished.out)["state"] == "stopped" and stopped_at >= 3
    assert [ref.step for ref in every_manifest_holds(path)] == [stopped_at]
    steps = stopped_at + 2
    resumed = run_cli(["run", path, "--json", *overrides, "--set", f"training.steps={steps}"])
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["tokens"] == 2 * 8 * 32
    assert_proven(path, steps=steps)


def test_a_run_whose_layout_is_left_to_the_planner_goes_on_with_another_number_of_ranks(
    corpus: str, tmp_path: Path
) -> None:
    path = write_job(tmp_path, corpus, steps=4)
    path.write_text(path.read_text().replace("local_batch_size = 4", 'layout = "auto"'))
    first = run_cli(["run", path, "--json"])
    assert first.code == 0, first.err
    assert first.err.startswith("layout for 2 ranks: dp_shard 2, zero 3 (CPUs")
    overrides = ("--set", "training.steps=6", "--nproc", "1")
    second = run_cli(["run", path, "--json", *overrides])
    assert second.code == 0, second.err
    assert second.err.startswith("layout for 1 rank: dp_shard 1, zero 3 (CPUs")
    assert json.loads(second.out)["tokens"] == 2 * 8 * 32
    attempts = lineage_of(path).attempts()
    assert [each.placement["parallel"]["dp_shard"] for each in attempts] == [2, 1]
    assert_proven(path, 6, "training.steps=6")


@pytest.mark.parametrize("precision", BOUNDS)
def test_resume_in_the_same_layout_is_bit_for_bit(
    corpus: str, server: ForkServer, tmp_path: Path, precision: str
) -> None:
    chosen = f'training.mixed_precision_param="{precision}"'
    paths = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        paths.append(write_job(tmp_path / name, corpus, steps=8))
    whole, resumed = paths
    run_here(whole, server, chosen)
    for steps in (3, 4, 8):
        run_here(resumed, server, chosen, f"training.steps={steps}")
    assert losses_of(whole) == losses_of(resumed) and len(losses_of(whole)) == 8
    expected, found = newest_tensors(whole), newest_tensors(resumed)
    assert expected.keys() == found.keys() and len(expected) > 10
    for name, values in expected.items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)
    assert len(lineage_of(resumed).attempts()) == 3
    assert_proven(resumed, 8, chosen)


RELAYOUT = {
    "one": ("cluster.nproc=1", "parallel.local_batch_size=8"),
    "dp2": ("cluster.nproc=2",),
    "dp4": ("cluster.nproc=4", "parallel.local_batch_size=2"),
    "dp3, which does not divide the batch": ("cluster.nproc=3", "parallel.local_batch_size=1"),
    "dp_replicate2": ("cluster.nproc=2", "parallel.dp_replicate=2", "parallel.zero=1"),
    "tp2 x dp2": ("cluster.nproc=4", "parallel.tp=2"),
    "pp2": ("cluster.nproc=2", "parallel.pp=2", "parallel.local_batch_size=2"),
    "cp2": ("cluster.nproc=2", "parallel.cp=2", "model.attn_backend=varlen", "loss.chunk_tokens=24"),
    "one again": ("cluster.nproc=1",),
}


@pytest.mark.parametrize("precision", BOUNDS)
def test_resume_in_other_layouts_keeps_the_loss_of_one_process(
    corpus: str, server: ForkServer, tmp_path: Path, precision: str
) -> None:
    """Case 13 of the checkpoints."""
    chosen = f'training.mixed_precision_param="{precision}"'
    last = 2 * len(RELAYOUT)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one, many = (write_job(tmp_path / name, corpus) for name in ("one", "many"))
    run_here(one, server, chosen, f"training.steps={last}", ONE_RANK, "checkpoint.interval=20")
    for number, layout in enumerate(RELAYOUT.values(), 1):
        run = run_here(many, server, chosen, f"training.steps={2 * number}", *layout)
        assert run.outcome is not None and run.outcome.ok, run.outcome
    losses = losses_of(many)
    assert sorted(losses) == list(range(1, last + 1))
    assert max_relative_difference(losses, losses_of(one)) <= BOUNDS[precision]
    placements = [attempt.placement["world_size"] for attempt in lineage_of(many).attempts()]
    assert placements == [1, 2, 4, 3, 2, 4, 2, 2, 1]
    assert_proven(many, last, chosen)


def test_checkpoint_loads_into_other_stages_and_keeps_the_loss_of_one_process(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    """With tied embeddings, which first and last stage share and a checkpoint holds once."""
    model = ("model.args.n_layers=5", "model.args.tie_embeddings=true")
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one, many = (write_job(tmp_path / name, corpus) for name in ("one", "many"))
    splits = ("parallel.stage_split=1,4", "parallel.stage_split=even", "parallel.stage_split=1,2,1,1", "")
    last = 2 * len(splits)
    run_here(one, server, *model, f"training.steps={last}", ONE_RANK, "checkpoint.interval=20")
    for number, split in enumerate(splits, 1):
        schedule = "interleaved_1f1b" if split.count(",") > 1 else "1f1b"
        pipeline = ("cluster.nproc=2", "parallel.pp=2", "parallel.local_batch_size=2", f"parallel.schedule={schedule}")
        run = run_here(many, server, *model, f"training.steps={2 * number}", *pipeline, *filter(None, [split]))
        assert run.outcome is not None and run.outcome.ok, run.outcome
    losses = losses_of(many)
    assert sorted(losses) == list(range(1, last + 1))
    assert max_relative_difference(losses, losses_of(one)) <= BOUNDS["float32"]
    assert_proven(many, last, *model)


def test_users_own_model_keeps_its_loss_over_a_change_of_layout(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one, many = (user_job(tmp_path / name, corpus, "Bigram") for name in ("one", "many"))
    run_here(one, server, ONE_RANK)
    for steps, nproc in ((2, 1), (4, 4), (6, 2)):
        run = run_here(many, server, f"training.steps={steps}", f"cluster.nproc={nproc}", "parallel.local_batch_size=2")
        assert run.outcome is not None and run.outcome.ok, run.outcome
    assert max_relative_difference(losses_of(many), losses_of(one)) <= BOUNDS["float32"]
    assert_proven(many, 6)


def test_checkpoint_is_taken_between_two_when_a_rank_is_told_so(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    path = write_job(tmp_path, corpus, steps=12)

    def ask(run: Run, event: Event) -> None:
        if event.kind == "progress" and event.fields["step"] == 2:
            assert run.gang is not None
            run.gang.signal(signal.SIGUSR1, [1])

    run_here(path, server, "checkpoint.interval=100", on_event=ask)
    early, last = (ref.step for ref in lineage_of(path).checkpoints())
    assert 2 < early < last == 12
    assert_proven(path, 12)


def test_summary_counts_the_tokens_of_steps_that_were_not_told(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    run = run_here(write_job(tmp_path, corpus, steps=7), server, "metrics.log_freq=3")
    assert sorted(run.tally.losses) == [3, 6, 7] and run.tally.tokens == 7 * 8 * 32


def test_debug_rank_without_a_terminal_is_refused_in_one_line(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus)
    finished = run_cli(["run", path, "--debug-rank", "0"])
    assert finished.code == 2
    assert finished.err.splitlines()[-1] == (
        "phalanx: --debug-rank: expected a terminal; run it from an interactive shell"
    )


def test_torchrun_is_the_same_loop_and_run_continues_it(corpus: str, server: ForkServer, tmp_path: Path) -> None:
    for name in ("torchrun", "run"):
        (tmp_path / name).mkdir()
    begun, whole = (write_job(tmp_path / name, corpus, steps=6) for name in ("torchrun", "run"))
    with torchrun(begun, "training.steps=4") as command:
        finished = command.finish()
        command.wait_until_nothing_lives()
    assert finished.code == 0, finished.err
    assert "committed attempt=1 step=4" in finished.err
    continued = run_here(begun, server)
    assert continued.outcome is not None and continued.outcome.ok and continued.tally.attempts == [2]
    run_here(whole, server)
    assert losses_of(begun) == losses_of(whole)
    for name, values in newest_tensors(whole).items():
        np.testing.assert_array_equal(values, newest_tensors(begun)[name], err_msg=name)
    assert_proven(begun, 6)
