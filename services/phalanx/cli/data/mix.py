"""`phalanx data mix`: other weights for the sources of a job, while it runs."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.context import Context, RequestId, open_client
from phalanx.cli.output import print_json
from phalanx.cli.places import given
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.lineage.wishes import Wish

_REMEDY = "write --set web=0.3, once for each source whose weight changes"


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("mix")(mix)


def mix(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="Job file, or name of a submitted job.", show_default=False, parser=given),
    ],
    weights: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME=WEIGHT", help="A source and its new weight; may be given several times."),
    ],
    request_id: RequestId = None,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Change how much of each source a job reads, from its next reading plan on (16 steps at most, or when it starts
    again). Weights that are not named stay.
    """
    from phalanx.cli.named import is_submitted

    wanted = _parsed(weights)
    request = request_id or uuid.uuid4().hex
    if is_submitted(job):
        with open_client(context) as client:
            number = client.mix(job, wanted, request_id=request)
    else:
        number = _in_storage(job, wanted, request).number
    if as_json:
        print_json({"wish": number, "weights": wanted, "request_id": request})
    else:
        told = ", ".join(f"{name} {weight}" for name, weight in wanted.items())
        typer.echo(f"wish {number}: {told}; it holds from the next reading plan on")


def _parsed(given: list[str]) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for text in given:
        name, equals, weight = (part.strip() for part in text.partition("="))
        if not (name and equals and weight):
            raise PhalanxError("--set", value=text, expected="NAME=WEIGHT", remedy=_REMEDY)
        if name in wanted:
            raise PhalanxError("--set", value=text, expected=f"one weight for {name}", remedy=_REMEDY)
        wanted[name] = weight
    return wanted


def _in_storage(path: str, wanted: dict[str, str], request_id: str) -> Wish:
    """For a job that no services run. Its file says where it is kept; what it was created with says its sources."""
    from phalanx.data.mixing import wish_for_weights
    from phalanx.lineage import Lineage
    from phalanx.spec import load_job, parse_job
    from phalanx.trainer.places import job_store

    if not Path(path).exists():
        raise PhalanxError(path, expected="a job file, or the name of a submitted job", remedy="check the path")
    job = load_job(path)
    store = job_store(job)
    record = Lineage(store).read_job()
    if record is None:
        raise PhalanxError(
            store.url, expected="a job that has been started", remedy="write the weights into its job file"
        )
    created = parse_job(record.spec, where=store.url)
    return wish_for_weights(store, created, wanted, request_id, steps=job.training.steps)
