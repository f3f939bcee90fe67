"""`phalanx checkpoint export`: a model folder for others."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.checkpoint.arguments import ANY_CHECKPOINT, Job
from phalanx.cli.checkpoint.progress import bytes_done
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_facts, print_json
from phalanx.cli.places import given_path
from phalanx.core.errors import OutsideError


class ExportDtype(StrEnum):
    """Types that weights can be exported in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("export")(export_checkpoint)


def export_checkpoint(
    job: Job,
    step: Annotated[str, typer.Argument(metavar="STEP", help=ANY_CHECKPOINT)],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to create.", parser=given_path)],
    dtype: Annotated[ExportDtype, typer.Option("--dtype", help="Type of the exported weights.")] = ExportDtype.FLOAT32,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="tokenizer.json; by default the one beside the training data.",
            parser=given_path,
        ),
    ] = None,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Export a checkpoint as a Hugging Face model folder that transformers opens. The folder appears when it is whole;
    after a kill the same command goes on with the files that are.
    """
    from phalanx.checkpoint.export import Export
    from phalanx.checkpoint.target import hugging_face_target
    from phalanx.cli.named import place_of
    from phalanx.lineage.leases import leased

    place = place_of(job, overrides or (), context)
    ref = place.checkpoint(step)
    target = hugging_face_target(place, tokenizer)
    with leased(place.store, ref, "export"), _what_stays_told(out):
        planned = Export(place.store, place.lineage.manifest(ref), target, dtype=dtype.value)
        with bytes_done("exporting", planned.num_bytes, quiet=as_json) as advance:
            report = planned.run(out, advance)
    facts = {"attempt": ref.attempt, "step": ref.step, **dataclasses.asdict(report)}
    print_json(facts) if as_json else print_facts(facts, "exported")


@contextmanager
def _what_stays_told(out: Path) -> Iterator[None]:
    """Tells whoever interrupts an export, or loses its storage, that nothing of it has to be done again."""
    try:
        yield
    except (KeyboardInterrupt, OutsideError):
        part = out.parent / f".{out.name}.part"
        if part.exists():
            sys.stderr.write(f"phalanx: the files that are whole stay in {part}; the same command goes on with them\n")
        raise
