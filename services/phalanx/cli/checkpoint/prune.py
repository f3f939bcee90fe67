"""`phalanx checkpoint prune`: remove what a job does not keep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from phalanx.cli.checkpoint.progress import size
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context, open_client
from phalanx.cli.named import is_submitted
from phalanx.cli.output import print_json, print_table
from phalanx.cli.places import given

if TYPE_CHECKING:
    from phalanx.checkpoint.collection import Report

_LONGEST_GRACE_S: Final = 30 * 86_400


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("prune")(prune_checkpoints)


def prune_checkpoints(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            parser=given,
            help="Name of a submitted job: pruned by the checkpoint service. Job file, or URL of a job's root: pruned "
            "here, straight on storage.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would go, and why.")] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0, max=_LONGEST_GRACE_S, help="Seconds between two looks at storage; what neither finds needed goes."
        ),
    ] = 60.0,
    keep_latest: Annotated[
        int | None, typer.Option(min=0, help="Instead of checkpoint.keep_latest_k; 0 keeps all live ones.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Root of the cluster that the job was submitted to, for its pins and forks.",
            parser=given,
        ),
    ] = None,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Remove checkpoints that the job does not keep, and what dead attempts left behind. Without --dry-run it deletes;
    what is needed to resume, pinned or under way always stays.
    """
    report = (
        _service_prune(job, context, dry_run=dry_run)
        if is_submitted(job)
        else _direct_prune(job, overrides or (), cluster, keep_latest, grace, dry_run=dry_run)
    )
    if as_json:
        print_json({"dry_run": dry_run, **dataclasses.asdict(report)})
        return
    gone = [
        (str(each.ref), "removed" if each.removed else "goes", each.why, each.num_objects, size(each.num_bytes))
        for each in report.removals
    ]
    stays = [(str(each.ref), "stays", each.why, "", "") for each in report.kept]
    print_table(("checkpoint", "what", "why", "objects", "size"), [*gone, *stays], "pruned")


def _service_prune(job: str, context: Path | None, *, dry_run: bool) -> Report:
    from phalanx.client import job_name

    with open_client(context) as client:
        return client.checkpoint.prune(job_name(job), dry_run=dry_run)


def _direct_prune(
    job: str, overrides: Sequence[str], cluster: str | None, keep_latest: int | None, grace_s: float, *, dry_run: bool
) -> Report:
    from phalanx.checkpoint.place import find_job
    from phalanx.checkpoint.pruning import prune

    place = find_job(job, overrides)
    policy = place.policy(keep_latest)
    root = None if cluster is None else place.open(cluster)
    return prune(place.store, policy, dry_run=dry_run, grace_s=grace_s, cluster=root, name=place.name, sleep=_told_wait)


def _told_wait(seconds: float) -> None:
    typer.echo(f"waiting {seconds:g} s to see what is still in use", err=True)
    time.sleep(seconds)
