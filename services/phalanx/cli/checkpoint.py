"""`phalanx checkpoint ls|show|verify|export|prune|pin|unpin`: what a job has saved, whether it is whole, what stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context, open_client
from phalanx.cli.named import is_submitted
from phalanx.cli.output import print_facts, print_json, print_table

if TYPE_CHECKING:
    from rich.progress import Progress

    from phalanx.checkpoint.catalog import View
    from phalanx.checkpoint.collection import Report
    from phalanx.lineage import CheckpointRef
    from phalanx.objects import ObjectStore
    from phalanx.snapshot.verify import Damage


class ExportDtype(StrEnum):
    """Types that weights can be exported in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_group = typer.Typer(no_args_is_help=True, help="List, show, verify, export, keep and remove checkpoints.")

Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Job file, URL of a job's root (.../projects/P/jobs/NAME), or name of a submitted job."
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the `checkpoint` group to the command line."""
    app.add_typer(_group, name="checkpoint")


@_group.command("ls")
def list_checkpoints(
    job: Job,
    show_all: Annotated[bool, typer.Option("--all", help="Also those that are not live, and why.")] = False,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """List the live checkpoints of a job, oldest first."""
    from phalanx.checkpoint.report import checkpoint_rows
    from phalanx.cli.named import place_of

    rows = checkpoint_rows(place_of(job, overrides or (), context).store, dead=show_all)
    if as_json:
        print_json({"checkpoints": [dataclasses.asdict(row) for row in rows]})
        return
    table = [
        (str(row.attempt), str(row.step), str(row.world_size or "?"), _size(row.num_bytes), row.why_dead or "live")
        for row in rows
    ]
    print_table(("attempt", "step", "ranks", "size", "state"), table, "checkpoints")


@_group.command("show")
def show(
    job: Job,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Step of a live checkpoint, or `latest`.")] = "latest",
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show a checkpoint: its tensors with shapes and sizes, and where it comes from."""
    from phalanx.checkpoint.report import ancestry, tensor_rows
    from phalanx.cli.named import place_of
    from phalanx.snapshot.index import read_index

    place = place_of(job, overrides or (), context)
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
        print_json({**facts, "parents": lineage_rows, "tensors": [dataclasses.asdict(row) for row in rows]})
        return
    print_facts({**facts, "parents": parents or "none: the beginning"}, "checkpoint")
    table = [(row.name, row.dtype, str(list(row.shape)), _size(row.num_bytes), row.num_boxes) for row in rows]
    print_table(("name", "type", "shape", "size", "boxes"), table, "tensors")


@_group.command("verify")
def verify_checkpoints(
    job: Job,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step, or `latest`; all live checkpoints if left out.")
    ] = None,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Read checkpoints again and check every digest; exit 1 where anything is damaged."""
    from phalanx.cli.named import place_of

    place = place_of(job, overrides or (), context)
    refs = list(place.lineage.checkpoints()) if step is None else [place.checkpoint(step)]
    found = {ref: _verify_one(place.store, ref, quiet=as_json) for ref in refs}
    rows = [
        {"attempt": ref.attempt, "step": ref.step, "damages": [dataclasses.asdict(damage) for damage in damages]}
        for ref, damages in found.items()
    ]
    if as_json:
        print_json({"checkpoints": rows, "ok": not any(found.values())})
    else:
        table = [
            (str(ref), damage.key, damage.what, damage.tensors) for ref, damages in found.items() for damage in damages
        ]
        whole = [(str(ref), "", "whole", ()) for ref, damages in found.items() if not damages]
        print_table(("checkpoint", "object", "finding", "tensors"), [*table, *whole], "verified")
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
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Export a checkpoint as a Hugging Face model folder that transformers opens."""
    from phalanx.checkpoint.export import export
    from phalanx.checkpoint.target import hugging_face_target
    from phalanx.cli.named import place_of

    place = place_of(job, overrides or (), context)
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
        print_json(facts)
    else:
        print_facts(facts, "exported")


Submitted = Annotated[str, typer.Argument(metavar="JOB", help="NAME, PROJECT/NAME or projects/PROJECT/jobs/NAME.")]
Selector = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="`latest`, a step, or a<attempt>-s<step>.")]


@_group.command("prune")
def prune_checkpoints(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="Name of a submitted job: pruned by the checkpoint service. Job file, or URL of a job's root: pruned "
            "here, straight on storage.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would go, and why.")] = False,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds between two looks at storage; what neither finds needed goes."),
    ] = 60.0,
    keep_latest: Annotated[
        int | None, typer.Option(min=0, help="Instead of checkpoint.keep_latest_k; 0 keeps all live ones.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Root of the cluster that the job was submitted to, for its pins and forks."),
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
        (str(each.ref), "removed" if each.removed else "goes", each.why, each.num_objects, _size(each.num_bytes))
        for each in report.removals
    ]
    stays = [(str(each.ref), "stays", each.why, "", "") for each in report.kept]
    print_table(("checkpoint", "what", "why", "objects", "size"), [*gone, *stays], "pruned")


@_group.command("pin")
def pin_checkpoint(
    job: Submitted,
    checkpoint: Selector,
    reason: Annotated[str, typer.Option("--reason", help="Why, for others to read.")] = "",
    expected_revision: Annotated[int, typer.Option(min=0, help="Revision of the pins as you saw them; 0: any.")] = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Keep a checkpoint of a submitted job whatever retention says, until it is unpinned."""
    from phalanx.client import job_name

    with open_client(context) as client:
        view, revision = client.checkpoint.pin(job_name(job), checkpoint, reason, expected_revision=expected_revision)
    _print_pin(view, revision, as_json=as_json)


@_group.command("unpin")
def unpin_checkpoint(
    job: Submitted,
    checkpoint: Selector,
    expected_revision: Annotated[int, typer.Option(min=0, help="Revision of the pins as you saw them; 0: any.")] = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Take a pin back; retention decides again."""
    from phalanx.client import job_name

    with open_client(context) as client:
        view, revision = client.checkpoint.unpin(job_name(job), checkpoint, expected_revision=expected_revision)
    _print_pin(view, revision, as_json=as_json)


def _print_pin(view: View, revision: int, *, as_json: bool) -> None:
    facts = {
        "attempt": view.ref.attempt,
        "step": view.ref.step,
        "state": str(view.state),
        "pinned": view.pin_reason is not None,
        "reason": view.pin_reason or "",
        "revision": revision,
    }
    print_json(facts) if as_json else print_facts(facts, "pin")


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
    return prune(place.store, policy, dry_run=dry_run, grace_s=grace_s, cluster=root, name=place.name)


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


def _size(num_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(num_bytes)
