"""`phalanx run JOB.toml`: train on this machine, alone; running it again continues."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.output import print_json
from phalanx.core.errors import PhalanxError

STOPPED_EXIT_CODE = 130


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job file.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine (overrides cluster.nproc).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (overrides cluster.device).")] = None,
    debug_rank: Annotated[
        int | None, typer.Option(help="Give this rank the terminal and pdb; switches all deadlines off.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; progress goes to stderr.")
    ] = False,
) -> int:
    """Train on this machine. Ctrl-C commits a checkpoint and exits; the same command goes on from it, in any layout."""
    from rich.console import Console

    from phalanx.cli.display import RunDisplay
    from phalanx.gang import Event, StopSignals
    from phalanx.spec import load_job
    from phalanx.spec.effects import without_effect
    from phalanx.trainer.figures import Figures
    from phalanx.trainer.local import fork_server, newest_step, run_job
    from phalanx.trainer.preflight import prepare
    from phalanx.trainer.tally import Tally

    overrides = list(set_ or [])
    overrides += [f"cluster.nproc={nproc}"] if nproc is not None else []
    overrides += [f'cluster.device="{device}"'] if device is not None else []
    spec = load_job(job, overrides)
    if spec.cluster.nodes != 1:
        raise PhalanxError(
            "cluster.nodes",
            value=spec.cluster.nodes,
            expected="1, since `phalanx run` starts ranks on this machine only",
            remedy="start `torchrun -m phalanx.trainer JOB` on every node, or override cluster.nodes=1",
        )
    console = Console(stderr=True)
    with StopSignals() as stop:
        prepared = prepare(spec, spec.cluster.world_size)
        for warning in without_effect(spec, prepared.layout):
            console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        if (reached := newest_step(prepared)) >= spec.training.steps:
            console.print(f"{spec.job.name}: done already, at step {reached}", markup=False, highlight=False)
            if json:
                print_json(summary_of(Tally(step=reached), "ok"))
            return 0
        with (
            RunDisplay(console, spec.training.steps, spec.job.name) as display,
            Figures(spec) as figures,
            fork_server() as server,
        ):

            def on_event(event: Event) -> None:
                display.observe(event)
                if event.rank == 0:
                    figures.observe(event.kind, event.fields)

            outcome = run_job(prepared, server, on_event, stop=stop, debug_rank=debug_rank)
    summary = summary_of(display.tally, outcome.state)
    if json:
        print_json(summary)
    if outcome.state == "failed" and outcome.first_cause is not None:
        cause = outcome.first_cause
        message = cause.message if cause.kind == "user_error" else f"{spec.job.name} failed: {cause}"
        sys.stderr.write(f"phalanx: {message}\n")
        return 2 if cause.kind == "user_error" else 1
    return STOPPED_EXIT_CODE if outcome.state == "stopped" else 0


def summary_of(tally: Any, state: str) -> dict[str, Any]:
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
