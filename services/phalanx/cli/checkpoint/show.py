"""`phalanx checkpoint show`: the tensors of one, and where it comes from."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from phalanx.cli.checkpoint.arguments import ANY_CHECKPOINT, Job
from phalanx.cli.checkpoint.progress import measured, size
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_facts, print_json, print_table


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("show")(show)


def show(
    job: Job,
    step: Annotated[str, typer.Argument(metavar="STEP", help=ANY_CHECKPOINT)] = "latest",
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show a checkpoint: its tensors with shapes and sizes, and where it comes from."""
    from phalanx.checkpoint.report import ancestry, one_row, pins_of, tensor_rows
    from phalanx.cli.named import place_of
    from phalanx.snapshot.index import read_index

    place = place_of(job, overrides or (), context)
    ref = place.checkpoint(step)
    manifest = place.lineage.manifest(ref)
    rows = tensor_rows(read_index(place.store, manifest))
    parents = ancestry(place.lineage, manifest)
    row = one_row(place.lineage, place.store, manifest, pins_of(place))
    facts = {
        "attempt": ref.attempt,
        "step": ref.step,
        "state": row.state,
        "metrics": row.metrics,
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
    print_facts(
        {**facts, "metrics": measured(row) or "none", "parents": parents or "none: the beginning"}, "checkpoint"
    )
    table = [(row.name, row.dtype, str(list(row.shape)), size(row.num_bytes), row.num_boxes) for row in rows]
    print_table(("name", "type", "shape", "size", "boxes"), table, "tensors")
