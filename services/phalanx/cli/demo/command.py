"""The `demo` command: tells the story, prints what it found, and leaves nothing running."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.places import given_path

if TYPE_CHECKING:
    from phalanx.cli.demo.story import Story


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(demo)


def demo(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Working folder; made anew by each demo.", parser=given_path)
    ] = Path("runs/demo"),
    keep_services: Annotated[
        bool, typer.Option("--keep-services", help="Leave the services up at the end, to look at the page.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; progress goes to stderr.")
    ] = False,
) -> int:
    """Prepare a corpus, start the services, train on 8 ranks, kill a rank, each service and the agent, change the
    layout, prove that nothing was lost, export (about 3 minutes).
    """
    from rich.console import Console

    from phalanx.cli.demo.folder import fresh_folder
    from phalanx.cli.demo.story import Story
    from phalanx.cli.output import print_facts, print_json
    from phalanx.trainer.local import fork_server

    started = time.monotonic()
    console = Console(stderr=True)
    story = Story(fresh_folder(folder), console)
    path = story.prepare()
    with story.services(keep=keep_services) as cluster:
        job = story.train(path, cluster)
    with fork_server() as server:
        story.prove(job, server)
        story.compare(path, server)
    story.export(job)
    summary = summary_of(story, time.monotonic() - started)
    print_facts(summary, "phalanx demo", console)
    if keep_services:
        home = folder.absolute() / "home"
        console.print(f"the services stay up: {story.found.page_url}; end them with `phalanx down --home {home}`")
    if json:
        print_json(summary)
    return 0


def summary_of(story: Story, wall_s: float) -> dict[str, Any]:
    """What `--json` prints. Samples are windows; recovery_s runs from SIGKILL of a rank to the first finished step, and
    its parts follow; agent_recovery_s the same for the agent.
    """
    found = story.found
    assert found.proof is not None and found.small_proof is not None and found.export_dir is not None
    assert found.facts is not None and found.trouble is not None
    from phalanx.cli.demo.trouble import AGENT, RANK

    rank, agent = (found.trouble.recoveries[victim] for victim in (RANK, AGENT))
    first_step_s, running_s = rank.first_step_s, rank.running_s
    losses = found.facts.losses
    return {
        "steps": found.facts.steps,
        "first_loss": losses[min(losses)],
        "final_loss": losses[max(losses)],
        "eval_loss": found.eval_loss,
        "tokens": found.facts.tokens,
        "tokens_per_second": found.facts.tokens_per_second,
        "attempts": found.facts.attempts,
        "layouts": found.layouts,
        "samples_missing": found.proof.samples_missing + found.small_proof.samples_missing,
        "samples_repeated": found.proof.samples_repeated + found.small_proof.samples_repeated,
        "steps_redone": found.proof.steps_redone,
        "checkpoints": found.checkpoints,
        "recovery_s": first_step_s,
        "recovery_to_ready_s": running_s,
        "recovery_first_step_s": None if first_step_s is None or running_s is None else first_step_s - running_s,
        "agent_recovery_s": agent.first_step_s,
        "service_restarts": found.service_restarts,
        "page_url": found.page_url,
        "reference_max_rel_diff": found.reference_max_rel_diff,
        "export_dir": str(found.export_dir),
        "wall_s": wall_s,
    }
