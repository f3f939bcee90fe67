"""`phalanx job stack`: where the code of ranks stands, and which of them do not answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.context import Context, open_client
from phalanx.cli.options import Option, named_as_given
from phalanx.cli.output import print_json
from phalanx.cli.places import given
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.train.values import JobView

_MUTE = 1


def register(group: typer.Typer) -> None:
    """Adds the command to the `job` group."""
    group.command("stack")(stack)


def stack(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="NAME, PROJECT/NAME or projects/PROJECT/jobs/NAME.", parser=given)
    ],
    rank: Annotated[list[int] | None, typer.Option("--rank", help="A rank; may be repeated (default: all).")] = None,
    context: Context = None,
    as_json: AsJson = False,
) -> int:
    """Print the Python stacks of a running job's ranks. Exit 1 where a rank gives none; with --json its stack is null,
    and `missing` says why.
    """
    wanted = tuple(rank or ())
    with open_client(context) as client:
        asked = _asked(client.job(job), wanted)
        start_s = time.monotonic()
        with named_as_given(
            {where: Option("--rank", wanted[0] if len(wanted) == 1 else list(wanted)) for where in ("rank", "ranks")}
        ):
            found = client.stacks(job, wanted)
        took_s = time.monotonic() - start_s
    missing = {number: _why(took_s) for number in sorted(asked - found.keys())}
    if as_json:
        facts: dict[str, Any] = {str(number): found.get(number) for number in sorted(asked | found.keys())}
        print_json({**facts, "missing": {str(number): why for number, why in missing.items()}} if missing else facts)
    else:
        for number, text in sorted(found.items()):
            sys.stdout.write(f"== rank {number}\n{text}\n")
    sys.stdout.flush()
    for number, why in missing.items():
        sys.stderr.write(f"phalanx: rank {number}: {why}\n")
    return _MUTE if missing else 0


def _asked(job: JobView, wanted: Collection[int]) -> set[int]:
    """The ranks that are to answer: those that are wanted, all of the newest attempt where none are named. Raises
    PhalanxError for a rank that the attempt does not have; of a job without one the service says so.
    """
    there = {number for each in job.placement for number in each.ranks}
    foreign = sorted(set(wanted) - there) if there else []
    if foreign:
        raise PhalanxError(
            "--rank", value=foreign[0], expected=f"a rank from 0 to {max(there)}", remedy="name ranks of the job"
        )
    return set(wanted) or there


def _why(took_s: float) -> str:
    return (
        f"no stack within {took_s:.1f} s: the process is stopped (SIGSTOP, a debugger), waits in the kernel, is just"
        " starting, or has ended; `ps -o pid,stat,wchan` on its node tells which"
    )
