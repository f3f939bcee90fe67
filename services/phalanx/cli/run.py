"""`phalanx run JOB.toml`: train on this machine, alone; running it again continues."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import Partial, with_partial
from phalanx.cli.output import print_json
from phalanx.cli.places import given_path
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.gang import Event, GangOutcome, StopSignals
    from phalanx.spec import Job
    from phalanx.trainer.preflight import Prepared
    from phalanx.trainer.tally import Tally

STOPPED_EXIT_CODE = 130


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.", parser=given_path)],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job file.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine (overrides cluster.nproc).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (overrides cluster.device).")] = None,
    partial: Partial = None,
    debug_rank: Annotated[
        int | None, typer.Option(help="Give this rank the terminal and pdb; switches all deadlines off.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; progress goes to stderr.")
    ] = False,
) -> int:
    """Train on this machine. Ctrl-C commits a checkpoint and exits; the same command goes on from it, in any layout."""
    from rich.console import Console

    from phalanx.gang import StopSignals
    from phalanx.trainer.local import newest_step
    from phalanx.trainer.preflight import prepare
    from phalanx.trainer.tally import Tally

    spec = _load(job, with_partial(set_, partial), nproc, device)
    console = Console(stderr=True)
    with StopSignals() as stop:
        prepared = prepare(spec, spec.cluster.world_size)
        _warn(prepared, console)
        if (reached := newest_step(prepared)) >= spec.training.steps:
            console.print(f"{spec.job.name}: done already, at step {reached}", markup=False, highlight=False)
            if json:
                print_json(summary_of(Tally(step=reached), "ok"))
            return 0
        tally, outcome = _train(prepared, console, stop, debug_rank)
    if json:
        print_json(summary_of(tally, outcome.state))
    return _exit_code(spec.job.name, outcome)


def _load(path: Path, overrides: Sequence[str], nproc: int | None, device: str | None) -> Job:
    """The job with all that the command line overrides; refused where it wants other machines too."""
    from phalanx.spec import load_job

    placement = [f"cluster.nproc={nproc}"] if nproc is not None else []
    placement += [f'cluster.device="{device}"'] if device is not None else []
    job = load_job(path, [*overrides, *placement])
    if job.cluster.nodes != 1:
        raise PhalanxError(
            "cluster.nodes",
            value=job.cluster.nodes,
            expected="1, since `phalanx run` starts ranks on this machine only",
            remedy="start `torchrun -m phalanx.trainer JOB` on every node, or override cluster.nodes=1",
        )
    return job


def _warn(prepared: Prepared, console: Console) -> None:
    """Says what layout was chosen and what lies on disks, and names the keys of the job file that do nothing in it."""
    from phalanx.spec.effects import without_effect

    for line in prepared.said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for warning in (*prepared.warnings, *without_effect(prepared.job, prepared.layout)):
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _train(
    prepared: Prepared, console: Console, stop: StopSignals, debug_rank: int | None
) -> tuple[Tally, GangOutcome]:
    """Runs the job to its end, shown on the console and in its sinks."""
    from phalanx.cli.display import RunDisplay
    from phalanx.trainer.figures import Figures
    from phalanx.trainer.local import fork_server, run_job

    job = prepared.job
    with (
        RunDisplay(console, job.training.steps, job.job.name) as display,
        Figures(job) as figures,
        fork_server(job.deadlines.init_s) as server,
    ):

        def on_event(event: Event) -> None:
            display.observe(event)
            if event.rank == 0:
                figures.observe(event.kind, event.fields)

        outcome = run_job(prepared, server, on_event, stop=stop, debug_rank=debug_rank)
    return display.tally, outcome


def _exit_code(name: str, outcome: GangOutcome) -> int:
    """0 done, 2 a user's mistake, 1 a failure (both named on stderr), 130 stopped by a signal."""
    if outcome.state == "failed":
        cause = outcome.first_cause
        assert cause is not None, "a failed run has a first cause"
        is_mistake = cause.kind in ("user_error", "superseded")
        sys.stderr.write(f"phalanx: {cause.message if is_mistake else f'{name} failed: {cause}'}\n")
        return 2 if is_mistake else 1
    return STOPPED_EXIT_CODE if outcome.state == "stopped" else 0


def summary_of(tally: Tally, state: str) -> dict[str, Any]:
    """What `--json` prints of a run."""
    return {
        "state": state,
        "steps": tally.step,
        "first_loss": tally.first_loss,
        "final_loss": tally.final_loss,
        "eval_loss": tally.eval_loss,
        "tokens": tally.tokens,
        "tokens_per_second": tally.tokens_per_second,
        "attempts": tally.attempts,
        "steps_redone": tally.steps_redone,
        "skipped_updates": tally.skipped_updates,
        "checkpoints": tally.checkpoints,
        "recovery_s": tally.recoveries_s,
        "incidents": tally.incidents,
    }
