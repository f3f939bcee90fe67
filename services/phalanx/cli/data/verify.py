"""`phalanx data verify`: every byte of a dataset, or what a run has read."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_json

if TYPE_CHECKING:
    from rich.progress import Progress

    from phalanx.spec import Job


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("verify")(verify)


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|JOB",
            help="Dataset or split folder (a URL), a job file (.toml), or name of a submitted job.",
            show_default=False,
        ),
    ],
    context: Context = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset against its digests; or, for a job, prove from the step records that its run
    read each window exactly once. Exit 1 where something is damaged or does not hold.
    """
    from phalanx.cli.named import job_of

    if "://" in target:
        _verify_dataset(target, as_json)
    else:
        _verify_job(job_of(target, overrides or (), context), as_json)


def _verify_job(job: Job, as_json: bool) -> None:
    from phalanx.data.job_proof import prove_job

    proof = prove_job(job)
    if as_json:
        print_json({**asdict(proof), "ok": proof.ok})
    else:
        for mismatch in proof.mismatches:
            typer.echo(mismatch)
        typer.echo(
            f"{proof.windows:,} windows of {proof.steps:,} steps on the live lineage: {proof.samples_missing} missing, "
            f"{proof.samples_repeated} repeated, {proof.num_mismatches} wrong; {proof.bytes_compared:,} bytes compared "
            f"with a reading by webdataset; {proof.steps_redone} recorded steps were redone"
        )
        if proof.windows_left_out or proof.windows_not_compared:
            typer.echo(
                f"{proof.windows_left_out:,} windows carry no loss by the journal; {proof.windows_not_compared:,} "
                "were read from shards that were damaged since, and can no longer be compared"
            )
        if len(proof.epochs) > 1:
            passes = ", ".join(f"{name} {epochs:.2f}" for name, epochs in proof.epochs.items())
            typer.echo(f"passes over each source: {passes}")
        if not proof.steps:
            typer.echo("no checkpoint is committed yet: there is nothing to prove")
    if not proof.ok:
        raise typer.Exit(1)


def _verify_dataset(url: str, as_json: bool) -> None:
    from phalanx.data.catalog import whole_and_lost_at
    from phalanx.data.verification import lost_manifests, verify_split, verify_tokenizers
    from phalanx.objects import open_store

    root = open_store(url)
    splits, lost = whole_and_lost_at(root)
    checks, num_bytes = 0, 0
    damages = [*lost_manifests(lost), *verify_tokenizers(root, splits)]
    is_done = False
    try:
        with _bar() as bar:
            task = bar.add_task("verify", total=sum(found.split.num_bytes for found in splits))
            for found in splits:
                for check in verify_split(found.store, found.split, lambda count: bar.advance(task, count)):
                    checks, num_bytes = checks + 1, num_bytes + check.num_bytes
                    damages += [(found.path, damage) for damage in check.damages]
        is_done = True
    finally:
        # What was found is told, too, where storage fails or the user has seen enough.
        if not as_json:
            for path, damage in damages:
                typer.echo(f"{path}/{damage}".lstrip("/"))
            typer.echo(
                f"{checks} shards checked, {num_bytes:,} bytes, {len(damages)} damages{'' if is_done else ' so far'}"
            )
    if as_json:
        rows = [{"path": path, **asdict(damage)} for path, damage in damages]
        print_json({"url": url, "shards": checks, "bytes": num_bytes, "ok": not damages, "damages": rows})
    if damages:
        raise typer.Exit(1)


def _bar() -> Progress:
    """Bytes done and to do, bytes a second and time left, on a terminal's standard error; else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}"), *columns, console=console, transient=True, disable=not console.is_terminal
    )
