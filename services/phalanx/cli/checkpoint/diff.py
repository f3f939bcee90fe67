"""`phalanx checkpoint diff`: which tensors changed between two checkpoints, and by how much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.checkpoint.arguments import ANY_CHECKPOINT, Job
from phalanx.cli.checkpoint.progress import bytes_done
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_json, print_table
from phalanx.cli.places import given

if TYPE_CHECKING:
    from phalanx.checkpoint.diff import Finding, Side, TensorDiff
    from phalanx.checkpoint.place import JobPlace
    from phalanx.lineage import CheckpointRef


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("diff")(diff_checkpoints)


def diff_checkpoints(
    job: Job,
    a: Annotated[str, typer.Argument(metavar="A", help=ANY_CHECKPOINT)],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    other_job: Annotated[
        str | None,
        typer.Option(
            "--other-job", metavar="JOB", parser=given, help="B is a checkpoint of this job.", show_default=False
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="List unchanged tensors too.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 1 where anything differs.")] = False,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Compare two checkpoints: which tensors hold other bits, and the norms of A, B and A - B in float64; which are
    only in one, or of another shape or type. Exit 0 where they could be compared, 1 where stored bytes are damaged.
    """
    from phalanx.checkpoint.diff import Comparison, Finding
    from phalanx.cli.named import place_of

    place = place_of(job, overrides or (), context)
    other = place if other_job is None else place_of(other_job, (), context)
    refs = place.checkpoint(a, "A"), other.checkpoint(b, "B")
    with ExitStack() as stack:
        compared = Comparison(_side(stack, place, refs[0]), _side(stack, other, refs[1]))
        with bytes_done("diff", compared.num_bytes, quiet=as_json) as advance:
            found = compared.run(advance)
    shown = [each for each in found if show_all or each.finding != Finding.UNCHANGED]
    counts = Counter(each.finding for each in found)
    if as_json:
        sides = {name: {"attempt": ref.attempt, "step": ref.step} for name, ref in zip("ab", refs, strict=True)}
        totals = {str(finding): counts[finding] for finding in Finding}
        equal = counts[Finding.UNCHANGED] == len(found)
        print_json({**sides, "equal": equal, "counts": totals, "tensors": [_row(each) for each in shown]})
    else:
        _print(shown, counts, refs)
    if counts[Finding.DAMAGED] or (exit_code and counts[Finding.UNCHANGED] < len(found)):
        raise typer.Exit(1)


def _side(stack: ExitStack, place: JobPlace, ref: CheckpointRef) -> Side:
    """One checkpoint, safe from retention until the stack is left."""
    from phalanx.checkpoint.diff import Side
    from phalanx.lineage.leases import leased

    stack.enter_context(leased(place.store, ref, "diff"))
    return Side.of(place.store, place.lineage.manifest(ref))


def _row(each: TensorDiff) -> dict[str, object]:
    """One tensor for JSON, which has neither NaN nor infinity: null there."""
    norms = each.norms
    values = {} if norms is None else {"a": norms.a, "b": norms.b, "difference": norms.difference}
    numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
    relative = None if norms is None or not math.isfinite(norms.relative) else norms.relative
    return {
        "name": each.name,
        "finding": str(each.finding),
        "a": each.a,
        "b": each.b,
        "norms": {**numbers, "relative": relative, "num_changed": norms.num_changed} if norms else None,
        "damage": each.damage,
    }


def _print(shown: Sequence[TensorDiff], counts: Counter[Finding], refs: tuple[CheckpointRef, CheckpointRef]) -> None:
    if shown:
        columns = ("name", "finding", "||A||", "||B||", "||A-B||", "relative", "elements", "type and shape")
        print_table(columns, [(each.name, str(each.finding), *_cells(each)) for each in shown])
    told = ", ".join(f"{count:,} {finding}" for finding, count in sorted(counts.items()))
    typer.echo(f"A is {refs[0]}, B is {refs[1]}: {told or 'no tensors'}")


def _cells(each: TensorDiff) -> tuple[object, ...]:
    what = each.damage or (each.a if each.a == each.b else f"{each.a or 'none'} -> {each.b or 'none'}")
    if each.norms is None:
        return ("", "", "", "", "", what)
    return (each.norms.a, each.norms.b, each.norms.difference, each.norms.relative, each.norms.num_changed, what)
