"""Whether a job file continues the job that is already there: same identity, or an error that names every key that
differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.lineage.values import JobRecord

_ABSENT = object()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


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
