"""The `demo` command: tells the story, prints what it found, and leaves nothing running."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.cli.demo.story import Story


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(demo)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Working folder; made anew by each demo.")] = Path("runs/demo"),
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; progress goes to stderr.")
    ] = False,
) -> int:
    """Prepare a corpus, train on 8 ranks, lose one, change the layout, prove that nothing was lost, export (about 3
    minutes).
    """
    from rich.console import Console

    from phalanx.cli.demo.folder import fresh_folder
    from phalanx.cli.demo.story import Story
    from phalanx.cli.output import print_facts, print_json
    from phalanx.trainer.local import fork_server

    started = time.monotonic()
    console = Console(stderr=True)
    with fork_server() as server:
        story = Story(fresh_folder(folder), console, server)
        path = story.prepare()
        job = story.train(path)
        story.prove(job)
        story.compare(path)
        story.export(job)
    summary = summary_of(story, time.monotonic() - started)
    print_facts(summary, "phalanx demo", console)
    if json:
        print_json(summary)
    return 0


def summary_of(story: Story, wall_s: float) -> dict[str, Any]:
    """What `--json` prints. Samples are windows; recovery_s runs from SIGKILL to the first finished step, and its parts
    follow.
    """
    found, trouble, tally = story.found, story.trouble, story.found.tally
    assert found.proof is not None and found.small_proof is not None and found.export_dir is not None
    recovery_s, ready_s = trouble.recovery_s, trouble.ready_again_s
    return {
        "steps": tally.step,
        "first_loss": tally.first_loss,
        "final_loss": tally.final_loss,
        "eval_loss": tally.eval_loss,
        "tokens": tally.tokens,
        "tokens_per_second": tally.tokens_per_second,
        "attempts": len(tally.attempts),
        "layouts": found.layouts,
        "samples_missing": found.proof.samples_missing + found.small_proof.samples_missing,
        "samples_repeated": found.proof.samples_repeated + found.small_proof.samples_repeated,
        "steps_redone": found.proof.steps_redone,
        "checkpoints": tally.checkpoints,
        "recovery_s": recovery_s,
        "recovery_to_ready_s": ready_s,
        "recovery_first_step_s": None if recovery_s is None or ready_s is None else recovery_s - ready_s,
        "reference_max_rel_diff": found.reference_max_rel_diff,
        "export_dir": str(found.export_dir),
        "wall_s": wall_s,
    }
