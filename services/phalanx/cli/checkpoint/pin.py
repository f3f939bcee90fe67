"""`phalanx checkpoint pin | unpin`: keep a checkpoint whatever retention says."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.checkpoint.arguments import Selector, Submitted
from phalanx.cli.config import AsJson
from phalanx.cli.context import Context, open_client
from phalanx.cli.options import Option, named_as_given
from phalanx.cli.output import print_facts, print_json

if TYPE_CHECKING:
    from phalanx.checkpoint.catalog import View


def register(group: typer.Typer) -> None:
    """Adds the two commands to the `checkpoint` group."""
    group.command("pin")(pin_checkpoint)
    group.command("unpin")(unpin_checkpoint)


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

    with open_client(context) as client, _as_given(checkpoint, expected_revision):
        view, revision = client.checkpoint.pin(job_name(job), checkpoint, reason, expected_revision=expected_revision)
    _print_pin(view, revision, as_json=as_json)


def unpin_checkpoint(
    job: Submitted,
    checkpoint: Selector,
    expected_revision: Annotated[int, typer.Option(min=0, help="Revision of the pins as you saw them; 0: any.")] = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Take a pin back; retention decides again."""
    from phalanx.client import job_name

    with open_client(context) as client, _as_given(checkpoint, expected_revision):
        view, revision = client.checkpoint.unpin(job_name(job), checkpoint, expected_revision=expected_revision)
    _print_pin(view, revision, as_json=as_json)


def _as_given(checkpoint: str, expected_revision: int) -> AbstractContextManager[None]:
    return named_as_given(
        {
            "selector": Option("CHECKPOINT", checkpoint),
            "expected revision": Option("--expected-revision", expected_revision),
        }
    )


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
