"""How a job begins with an import: its origin, its first attempt, and the manifest of that one's checkpoint.

An import is the first attempt of the job, which trains nothing. Said twice it is one; a job that began otherwise is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.checkpoint.importing.mapping import ImportPlan
from phalanx.checkpoint.importing.source import Source
from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, ForkPoint, Lineage, LoaderState, Manifest, keys
from phalanx.lineage.encoding import encode
from phalanx.lineage.journal import journal_digest
from phalanx.objects import ObjectStore
from phalanx.snapshot.fork import IMPORT_ATTEMPT

PROJECT: Final = "@import"  # no project can be called so


def origin_of(source: Source, plan: ImportPlan, step: int) -> ForkPoint:
    """Names the source where a fork names its origin: steps and windows of the job count from here."""
    facts = {
        "source": source.digest,
        "rotary": plan.rotary,
        "with_optimizer": plan.with_optimizer,
        "left_out": list(plan.left_out),
    }
    uid = f"{source.kind}-{digest_of(facts).removeprefix('sha256:')[:32]}"
    return ForkPoint(PROJECT, uid, IMPORT_ATTEMPT, step, 0)


def require_beginning(store: ObjectStore, lineage: Lineage, origin: ForkPoint, placement: Mapping[str, Any]) -> None:
    """The job must be new, or this very import of it have begun; PhalanxError otherwise. placement: see
    `placement_of`.
    """
    record = lineage.read_job()
    if record is None or record.origin == origin:
        return
    begun = "a job that began otherwise"
    if record.origin is not None:
        begun = f"a job that began with {record.origin}"
        if record.origin.project == PROJECT:
            begun = f"a job whose import was begun with {_otherwise(lineage.attempts(), placement)}"
    raise PhalanxError(
        f"job at {store.url}",
        value=begun,
        expected="a new job, or one for which this same import of the same source was begun",
        remedy="give the job another [job] name",
    )


def opened_attempt(
    lineage: Lineage, store: ObjectStore, origin: ForkPoint, placement: Mapping[str, Any], code: str, identity: str
) -> Attempt:
    """The first attempt, opened or found. placement: says what was imported, and from where. code, identity: digests.
    Raises PhalanxError where another is there.
    """
    attempt = Attempt(
        IMPORT_ATTEMPT, None, (), journal_digest(()), code, identity, dict(placement), f"import of {origin.uid}"
    )
    there = lineage.attempts()
    if there:
        return _same(there[0], attempt, store)
    try:
        lineage.put(keys.attempt(IMPORT_ATTEMPT), encode(attempt))
    except DamagedObject:  # another process was faster
        return _same(lineage.attempts()[0], attempt, store)
    return attempt


def placement_of(source: Source, plan: ImportPlan, origin: ForkPoint) -> Mapping[str, Any]:
    """What the attempt says of the source."""
    said = {"kind": source.kind, "url": source.url, "digest": source.digest, "rotary": plan.rotary}
    chosen = {"optimizer": "imported" if plan.with_optimizer else "begins anew", "left_out": list(plan.left_out)}
    return {"import": {**origin.plain(), "source": {**said, **chosen}}}


def _otherwise(there: Sequence[Attempt], wanted: Mapping[str, Any]) -> str:
    """In what the import that was begun differs from the one that is wanted, for people."""
    begun: Mapping[str, Any] = there[0].placement.get("import", {}) if there else {}
    now = wanted["import"]
    pairs = {"step": (begun.get("step"), now["step"])}
    pairs |= {name: (begun.get("source", {}).get(name), value) for name, value in now["source"].items()}
    if pairs["digest"][0] == pairs["digest"][1]:
        pairs.pop("url")  # the same bytes elsewhere are the same source
    told = [
        f"{name} {_listed(then)}, not {_listed(value)}"
        for name, (then, value) in pairs.items()
        if then is not None and then != value
    ]
    return "; ".join(told) or "other options"


def _listed(value: object) -> str:
    return (", ".join(map(str, value)) or "nothing") if isinstance(value, list) else str(value)


def manifest_of(attempt: Attempt, ref: CheckpointRef, num_updates: int) -> Manifest:
    """The manifest without its parts."""
    return Manifest(
        attempt=ref.attempt,
        step=ref.step,
        world_size=1,
        identity_digest=attempt.identity_digest,
        placement_digest=digest_of(attempt.placement),
        code_digest=attempt.code_digest,
        journal_digest=journal_digest(()),
        loader=LoaderState(ref.step, 0),
        schedule={"num_updates": num_updates},
        records=(),
        parts=(),
    )


def _same(found: Attempt, wanted: Attempt, store: ObjectStore) -> Attempt:
    """The attempt that is there, if it is that of this import; where the source lay then does not matter."""

    def essence(attempt: Attempt) -> tuple[object, str]:
        said: Mapping[str, Any] = attempt.placement.get("import", {})
        return {name: value for name, value in said.items() if name != "source"}, attempt.identity_digest

    if essence(found) != essence(wanted):
        raise PhalanxError(
            f"job at {store.url}",
            expected="one whose first attempt is this import",
            remedy="give the job another [job] name",
        )
    return found
