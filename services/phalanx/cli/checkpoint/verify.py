"""`phalanx checkpoint verify`: every byte against its digests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.checkpoint.arguments import ANY_CHECKPOINT, Job
from phalanx.cli.checkpoint.progress import bytes_done
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.output import print_json, print_table
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.lineage import CheckpointRef, Lineage
    from phalanx.objects import ObjectStore
    from phalanx.snapshot.verify import Damage


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("verify")(verify_checkpoints)


def verify_checkpoints(
    job: Job,
    step: Annotated[
        str | None,
        typer.Argument(metavar="STEP", help=f"{ANY_CHECKPOINT} All live ones if left out."),
    ] = None,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Read checkpoints again and check every digest; names damaged objects, tensors and chunks. Exit 1 where there are
    any.
    """
    from phalanx.cli.named import place_of

    place = place_of(job, overrides or (), context)
    refs = list(place.lineage.checkpoints()) if step is None else [place.checkpoint(step)]
    found = _verified(place.store, refs, quiet=as_json)
    if step is not None and None in found.values():
        raise PhalanxError("STEP", value=step, expected="a checkpoint that retention keeps", remedy="choose another")
    if as_json:
        rows = [_row(ref, damages) for ref, damages in found.items()]
        print_json({"checkpoints": rows, "ok": not any(found.values())})
    else:
        lines = [line for ref, damages in found.items() for line in _lines(ref, damages)]
        print_table(("checkpoint", "object", "finding", "tensors"), lines, "verified")
    if any(found.values()):
        raise typer.Exit(1)


def _verified(
    store: ObjectStore, refs: Sequence[CheckpointRef], *, quiet: bool
) -> dict[CheckpointRef, tuple[Damage, ...] | None]:
    """What is wrong with each; None for one that was removed before it had been read."""
    with bytes_done("verify", sum(_bytes_of(store, ref) for ref in refs), quiet=quiet) as advance:
        return {ref: _verify_one(store, ref, advance) for ref in refs}


def _bytes_of(store: ObjectStore, ref: CheckpointRef) -> int:
    from phalanx.lineage import DamagedObject, Lineage
    from phalanx.snapshot.verify import checkpoint_bytes

    try:
        return checkpoint_bytes(store, Lineage(store).manifest(ref))
    except DamagedObject:
        return 0  # what is wrong with it is found, and told, when it is verified


def _verify_one(store: ObjectStore, ref: CheckpointRef, advance: Callable[[int], None]) -> tuple[Damage, ...] | None:
    """What is wrong with one checkpoint; a damaged manifest is the first thing that can be."""
    from phalanx.lineage import DamagedObject, Lineage
    from phalanx.lineage.leases import BeingRemoved, CheckpointRemoved, leased
    from phalanx.snapshot.verify import Damage, verify

    lineage = Lineage(store)
    try:
        with leased(store, ref, "verify"):
            return verify(store, lineage.manifest(ref), advance)
    except (BeingRemoved, CheckpointRemoved):
        return None
    except DamagedObject as error:
        return None if _is_removed(lineage, ref) else (Damage(error.key, error.reason),)


def _is_removed(lineage: Lineage, ref: CheckpointRef) -> bool:
    """Whether retention took it away: it leaves a copy of the manifest under another name."""
    return ref not in lineage.checkpoints() and lineage.retired(ref) is not None


def _row(ref: CheckpointRef, damages: tuple[Damage, ...] | None) -> dict[str, object]:
    found = [dataclasses.asdict(damage) for damage in damages or ()]
    return {"attempt": ref.attempt, "step": ref.step, "damages": found, "removed": damages is None}


def _lines(ref: CheckpointRef, damages: tuple[Damage, ...] | None) -> list[tuple[object, ...]]:
    if not damages:
        return [(str(ref), "", "whole" if damages is not None else "removed before it was read", "")]
    return [(str(ref), each.key, each.what, _tensors(each)) for each in damages]


def _tensors(damage: Damage) -> tuple[str, ...]:
    """The damaged tensors, with their chunks where these are known."""
    known = {each.tensor for each in damage.chunks}
    return (*map(str, damage.chunks), *(name for name in damage.tensors if name not in known))
