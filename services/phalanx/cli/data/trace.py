"""`phalanx data trace`: from steps to documents and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.data.arguments import refuse
from phalanx.cli.output import print_json, print_table
from phalanx.cli.places import given
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.data.tracing import Tracer
    from phalanx.spec import Job

_EPOCHS, _LIMIT = 2, 20
Job_ = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help="Job file, or name of a submitted job.", show_default=False, parser=given),
]


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("trace")(trace)


def trace(
    job: Job_ = None,
    named: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="The same as JOB.", show_default=False, parser=given)
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Show the documents of this step's batch.")] = None,
    document: Annotated[
        str | None, typer.Option("--document", metavar="ID", help="Show the steps that see this document.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Show the documents that say this, and the steps that see them.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            help="Passes over the data to follow a document through (10,000 at most).",
            show_default=str(_EPOCHS),
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="With --text: most documents to show.", show_default=str(_LIMIT)),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Decode what is found, too.")] = False,
    context: Context = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say which documents a step trains on, or which steps train on a document or a text. Only --text and --show read
    tokens.
    """
    from rich.console import Console

    from phalanx.cli.counting import counting
    from phalanx.cli.named import job_of
    from phalanx.data.job_tracing import tracer_of

    where = _one_job(job, named)
    if [step, document, text].count(None) != 2:
        raise PhalanxError(
            "phalanx data trace",
            expected="either --step N or --document ID or --text TEXT",
            remedy="give one of them",
        )
    if step is not None:
        refuse({"--epochs": epochs, "--limit": limit}, "--step")
    if document is not None:
        refuse({"--limit": limit}, "--document")
    epochs, limit = epochs or _EPOCHS, limit or _LIMIT
    found = job_of(where, overrides or (), context)
    with counting(Console(stderr=True)) as observe:
        tracer = tracer_of(found, shows=show, told=observe)
        if step is not None:
            subject, rows = _step(tracer, found, step)
        elif document is not None:
            rows = [asdict(visit) for visit in tracer.document(document, epochs)]
            subject = {"document": document, "visits": rows}
        else:
            subject, rows = _text(tracer, str(text), epochs, limit)
    subject = {**subject, "last_step": tracer.last_step}
    if as_json:
        print_json(subject)
    else:
        _print(subject, rows, {"text": show, "source": tracer.is_mixture})


def _one_job(job: str | None, named: str | None) -> str:
    where = job or named
    if where is None or (job and named):
        raise PhalanxError(
            "phalanx data trace",
            expected="one job: JOB or --job JOB",
            remedy="name a job file, or a submitted job",
        )
    return where


def _step(tracer: Tracer, job: Job, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from phalanx.data.job_tracing import trained

    rows = [asdict(segment) for segment in tracer.step(step)]
    return {"step": step, **asdict(trained(job, step)), "segments": rows}, rows


def _text(tracer: Tracer, text: str, epochs: int, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = tracer.text(text, epochs, limit)
    rows = [asdict(visit) for visit in found.visits]
    counts = {"documents": found.documents, "occurrences": found.occurrences, "is_all": found.is_all}
    return {"text": text, **counts, "visits": rows}, rows


def _print(subject: dict[str, Any], rows: list[dict[str, Any]], shown: dict[str, bool]) -> None:
    """shown: whether a column is, where not all jobs need it."""
    columns = [name for name in rows[0] if shown.get(name, True)]
    print_table(columns, ([_plain(row[column]) for column in columns] for row in rows))
    if "segments" in subject and subject["attempt"] is not None:
        again = f"; attempts {', '.join(map(str, subject['redone']))} too, in vain" if subject["redone"] else ""
        typer.echo(f"trained by attempt {subject['attempt']}{again}")
    if "is_all" in subject:
        more = "all that say it" if subject["is_all"] else "the first that say it; --limit shows more"
        typer.echo(f"{subject['documents']} documents, {more}")
    last = subject["last_step"]
    if last is not None and max(_steps(subject), default=0) > last:
        typer.echo(f"the job ends at step {last:,}: the steps behind it are those that it would train if it went on")


def _steps(subject: dict[str, Any]) -> list[int]:
    """The steps that an answer names."""
    if "step" in subject:
        return [subject["step"]]
    return [step for visit in subject["visits"] for step in visit["steps"]]


def _plain(value: object) -> object:
    """A text in one line."""
    return value.replace("\n", "⏎") if isinstance(value, str) else value
