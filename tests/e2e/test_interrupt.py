"""Ctrl-C in each stage of a run: nothing is left running, no half manifest, and the same command goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import (
    PHALANX,
    TIMEOUT_S,
    Command,
    assert_proven,
    every_manifest_holds,
    job_folder,
    run_here,
    wait_until,
    write_job,
)

from phalanx.gang import ForkServer


def _is_there(pattern: str) -> Callable[[Path, Command], None]:
    """Waits for an object of the job."""

    def wait(path: Path, command: Command) -> None:
        folder = job_folder(path)
        wait_until(lambda: any(folder.glob(pattern)), TIMEOUT_S, f"no {pattern}")

    return wait


def _says(text: str) -> Callable[[Path, Command], None]:
    return lambda path, command: command.wait_for(text)


def _has_ranks(path: Path, command: Command) -> None:
    wait_until(lambda: len(command.ranks()) == 2, TIMEOUT_S, "no ranks")


STAGES = {
    "preflight": _is_there("job.json"),
    "fork server": lambda path, command: wait_until(lambda: len(command.alive()) > 1, TIMEOUT_S, "no fork server"),
    "start of the ranks": _has_ranks,
    "opening": _is_there("attempts/*.json"),
    "first step": _says("opens after step 0"),
    "save": _is_there("a*/s*/objects/*"),
    "commit": _is_there("a*/s*/parts/*"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_interrupt_leaves_no_process_and_no_half_manifest_and_the_job_goes_on(
    corpus: str, server: ForkServer, tmp_path: Path, stage: str
) -> None:
    path = write_job(tmp_path, corpus, steps=5000)
    with Command([PHALANX, "run", path]) as command:
        STAGES[stage](path, command)
        command.signal(signal.SIGINT)
        finished = command.finish(30)
        command.wait_until_nothing_lives()
    assert finished.code == 130, finished.err
    assert "Traceback" not in finished.err
    refs = every_manifest_holds(path)
    if stage in ("first step", "save", "commit"):
        assert refs, "the steps that were done are lost"
    steps = (refs[-1].step if refs else 0) + 2
    run = run_here(path, server, f"training.steps={steps}")
    assert run.outcome is not None and run.outcome.ok
    assert_proven(path, steps)


def test_interrupt_while_restoring_leaves_the_checkpoint_and_the_job_goes_on(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    path = write_job(tmp_path, corpus)
    run_here(path, server, "training.steps=4")
    with Command([PHALANX, "run", path, "--set", "training.steps=5000"]) as command:
        command.wait_for("attempt 2 opens after step 4")
        command.signal(signal.SIGINT)
        finished = command.finish(30)
        command.wait_until_nothing_lives()
    assert finished.code == 130, finished.err
    last = every_manifest_holds(path)[-1].step
    assert last >= 4
    run = run_here(path, server, f"training.steps={last + 2}")
    assert run.outcome is not None and run.outcome.ok
    assert_proven(path, last + 2)


def test_second_interrupt_kills_at_once(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=5000)
    with Command([PHALANX, "run", path]) as command:
        command.wait_for("checkpoint of step 2 committed")
        for pid in command.ranks():
            os.kill(pid, signal.SIGSTOP)
        command.signal(signal.SIGINT)
        command.wait_for("stopping")
        command.signal(signal.SIGINT)
        finished = command.finish(30)
        command.wait_until_nothing_lives()
    assert finished.code == 130 and "killed" in finished.err, finished.err
    assert every_manifest_holds(path)
