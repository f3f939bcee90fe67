"""`phalanx checkpoint verify`: every byte against its digests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.checkpoint.arguments import Job
from phalanx.cli.checkpoint.progress import progress_of_bytes
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_json, print_table

if TYPE_CHECKING:
    from phalanx.lineage import CheckpointRef
    from phalanx.objects import ObjectStore
    from phalanx.snapshot.verify import Damage


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("verify")(verify_checkpoints)


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


def _verify_one(store: ObjectStore, ref: CheckpointRef, *, quiet: bool) -> tuple[Damage, ...]:
    """What is wrong with one checkpoint; a damaged manifest is the first thing that can be."""
    from phalanx.lineage import DamagedObject, Lineage
    from phalanx.snapshot.verify import Damage, checkpoint_bytes, verify

    try:
        manifest = Lineage(store).manifest(ref)
    except DamagedObject as error:
        return (Damage(error.key, error.reason),)
    with progress_of_bytes(quiet=quiet) as progress:
        task = progress.add_task(str(ref), total=checkpoint_bytes(store, manifest))
        return verify(store, manifest, lambda done: progress.update(task, advance=done))
