"""Whether a job file continues the job that is already there: same identity, or an error that names every key that
differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.lineage.values import ForkPoint, JobRecord
from phalanx.spec.changes import flattened

_ABSENT = object()


def identity_differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    """One `key = given (stored)` for each key in which the identities differ, by key."""
    before, now = dict(flattened(stored)), dict(flattened(given))
    return tuple(
        f"{key} = {_shown(now, key)} (was {_shown(before, key)})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
    )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


def require_same_identity(stored: JobRecord, given: JobRecord, url: str) -> None:
    """Raises PhalanxError, naming the keys that differ, unless `given` is the job that is stored at `url`."""
    if stored.identity_digest == given.identity_digest:
        return
    different = identity_differences(stored.identity, given.identity)
    raise PhalanxError(
        f"job at {url}",
        value=", ".join(different) or "the data (same keys, another dataset digest)",
        expected="the identity with which the job was created",
        remedy="set these keys back, or give the job another [job] name to start a new one",
    )


def require_same_origin(stored: JobRecord, given: JobRecord, url: str) -> None:
    """Raises PhalanxError where `given` names another beginning than the job at `url` has; none is no other."""
    if given.origin is not None and stored.origin != given.origin:
        raise PhalanxError(
            f"job at {url}",
            value="a job that begins anew" if stored.origin is None else str(stored.origin),
            expected=f"a job that was forked from {given.origin}",
            remedy="give the job another [job] name",
        )


def position_after(step: int, global_batch_size: int, origin: ForkPoint | None) -> int:
    """First window position that a job has not read after `step`: its steps read batch after batch, a fork's from
    where its origin stood.
    """
    if origin is None:
        return step * global_batch_size
    return origin.position + (step - origin.step) * global_batch_size
