"""`phalanx checkpoint export`: a model folder for others."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.checkpoint.arguments import Job
from phalanx.cli.checkpoint.progress import progress_of_bytes
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_facts, print_json


class ExportDtype(StrEnum):
    """Types that weights can be exported in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("export")(export_checkpoint)


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
    with progress_of_bytes(quiet=as_json) as progress:
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
