"""`phalanx data trace`: from steps to documents and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_json, print_table
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.data.tracing import Tracer
    from phalanx.spec import Job


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("trace")(trace)


def trace(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Job file, or name of a submitted job.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option("--step", help="Show the documents of this step's batch.")] = None,
    document: Annotated[
        str | None, typer.Option("--document", metavar="ID", help="Show the steps that see this document.")
    ] = None,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Passes over the data to follow a document through.")
    ] = 2,
    context: Context = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say which documents a step trains on, or which steps train on a document; without reading a token."""
    if (step is None) == (document is None):
        raise PhalanxError("phalanx data trace", expected="either --step N or --document ID", remedy="give one of them")
    from phalanx.cli.named import job_of

    tracer = _tracer(job_of(job, overrides or (), context))
    if step is not None:
        rows = [asdict(segment) for segment in tracer.step(step)]
        subject: dict[str, Any] = {"step": step, "segments": rows}
    else:
        rows = [asdict(visit) for visit in tracer.document(str(document), epochs)]
        subject = {"document": document, "visits": rows}
    if as_json:
        print_json(subject)
    else:
        print_table(list(rows[0]), (list(row.values()) for row in rows))


def _tracer(job: Job) -> Tracer:
    """The tracer of a job's training split."""
    from phalanx.data.tracing import Tracer
    from phalanx.stream import open_split
    from phalanx.trainer.places import order_of, store_at

    store = store_at(job, job.data.train)
    split = open_split(store, job.data.train_digest)
    return Tracer(store, split, order_of(job, store, split), job.training.global_batch_size)
