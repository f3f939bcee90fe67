"""`phalanx checkpoint ls|show|verify|export`: what a job has saved, whether it is whole, and its export."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from phalanx.lineage import CheckpointRef
    from phalanx.objects import ObjectStore
    from phalanx.snapshot.verify import Damage


class ExportDtype(StrEnum):
    """Types that weights can be exported in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_group = typer.Typer(no_args_is_help=True, help="List, show, verify and export checkpoints.")

Job = Annotated[str, typer.Argument(metavar="JOB", help="Job file, or URL of a job's root (.../projects/P/jobs/NAME).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job file.")
]


def register(app: typer.Typer) -> None:
    """Adds the `checkpoint` group to the command line."""
    app.add_typer(_group, name="checkpoint")


@_group.command("ls")
def list_checkpoints(
    job: Job,
    show_all: Annotated[bool, typer.Option("--all", help="Also those that are not live, and why.")] = False,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """List the live checkpoints of a job, oldest first."""
    from phalanx.checkpoint.place import find_job
    from phalanx.checkpoint.report import checkpoint_rows

    rows = checkpoint_rows(find_job(job, overrides or ()).store, dead=show_all)
    if as_json:
        _print_json({"checkpoints": [dataclasses.asdict(row) for row in rows]})
        return
    table = [
        (str(row.attempt), str(row.step), str(row.world_size or "?"), _size(row.num_bytes), row.why_dead or "live")
        for row in rows
    ]
    _print_table("checkpoints", ("attempt", "step", "ranks", "size", "state"), table)


@_group.command("show")
def show(
    job: Job,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Step of a live checkpoint, or `latest`.")] = "latest",
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Show a checkpoint: its tensors with shapes and sizes, and where it comes from."""
    from phalanx.checkpoint.place import find_job
    from phalanx.checkpoint.report import ancestry, tensor_rows
    from phalanx.snapshot.index import read_index

    place = find_job(job, overrides or ())
    ref = place.checkpoint(step)
    manifest = place.lineage.manifest(ref)
    rows = tensor_rows(read_index(place.store, manifest))
    parents = ancestry(place.lineage, manifest)
    facts = {
        "attempt": ref.attempt,
        "step": ref.step,
        "world_size": manifest.world_size,
        "position": manifest.loader.position,
        "identity_digest": manifest.identity_digest,
        "placement_digest": manifest.placement_digest,
        "code_digest": manifest.code_digest,
        "journal_digest": manifest.journal_digest,
        "schedule": dict(manifest.schedule),
        "num_bytes": sum(row.num_bytes for row in rows),
    }
    if as_json:
        lineage_rows = [{"attempt": parent.attempt, "step": parent.step} for parent in parents]
        _print_json({**facts, "parents": lineage_rows, "tensors": [dataclasses.asdict(row) for row in rows]})
        return
    parents_text = ", ".join(map(str, parents)) or "none: the beginning"
    _print_table(
        "checkpoint",
        ("what", "value"),
        [*((name, str(value)) for name, value in facts.items()), ("parents", parents_text)],
    )
    table = [(row.name, row.dtype, str(list(row.shape)), _size(row.num_bytes), str(row.num_boxes)) for row in rows]
    _print_table("tensors", ("name", "type", "shape", "size", "boxes"), table)


@_group.command("verify")
def verify_checkpoints(
    job: Job,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step, or `latest`; all live checkpoints if left out.")
    ] = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Read checkpoints again and check every digest; exit 1 where anything is damaged."""
    from phalanx.checkpoint.place import find_job

    place = find_job(job, overrides or ())
    refs = list(place.lineage.checkpoints()) if step is None else [place.checkpoint(step)]
    found = {ref: _verify_one(place.store, ref, quiet=as_json) for ref in refs}
    rows = [
        {"attempt": ref.attempt, "step": ref.step, "damages": [dataclasses.asdict(damage) for damage in damages]}
        for ref, damages in found.items()
    ]
    if as_json:
        _print_json({"checkpoints": rows, "ok": not any(found.values())})
    else:
        table = [
            (str(ref), damage.key, damage.what, ", ".join(damage.tensors))
            for ref, damages in found.items()
            for damage in damages
        ]
        whole = [(str(ref), "", "whole", "") for ref, damages in found.items() if not damages]
        _print_table("verified", ("checkpoint", "object", "finding", "tensors"), [*table, *whole])
    if any(found.values()):
        raise typer.Exit(1)


@_group.command("export")
def export_checkpoint(
    job: Job,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Step of a live checkpoint, or `latest`.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to create.")],
    dtype: Annotated[ExportDtype, typer.Option("--dtype", help="Type of the exported weights.")] = ExportDtype.FLOAT32,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="tokenizer.json; by default the one beside the training data.")
    ] = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Export a checkpoint as a Hugging Face model folder that transformers opens."""
    from phalanx.checkpoint.export import export
    from phalanx.checkpoint.place import find_job
    from phalanx.checkpoint.target import hugging_face_target

    place = find_job(job, overrides or ())
    manifest = place.lineage.manifest(place.checkpoint(step))
    target = hugging_face_target(place, tokenizer)
    with _progress(quiet=as_json) as progress:
        task = progress.add_task("exporting", total=None)
        report = export(
            place.store,
            manifest,
            out,
            target,
            dtype=dtype.value,
            progress=lambda done: progress.update(task, advance=done),
        )
    facts = {"attempt": manifest.attempt, "step": manifest.step, **dataclasses.asdict(report)}
    if as_json:
        _print_json(facts)
    else:
        _print_table("exported", ("what", "value"), [(name, str(value)) for name, value in facts.items()])


def _verify_one(store: ObjectStore, ref: CheckpointRef, *, quiet: bool) -> tuple[Damage, ...]:
    """What is wrong with one checkpoint; a damaged manifest is the first thing that can be."""
    from phalanx.lineage import DamagedObject, Lineage
    from phalanx.snapshot.verify import Damage, checkpoint_bytes, verify

    try:
        manifest = Lineage(store).manifest(ref)
    except DamagedObject as error:
        return (Damage(error.key, error.reason),)
    with _progress(quiet=quiet) as progress:
        task = progress.add_task(str(ref), total=checkpoint_bytes(store, manifest))
        return verify(store, manifest, lambda done: progress.update(task, advance=done))


def _progress(*, quiet: bool) -> Progress:
    """A bar of bytes on stderr, so that stdout holds the answer alone."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _size(num_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(num_bytes)
