"""Which keys of a job may change when, and whether a changed job file may go on from what another one trained: pure.

Resume goes on with the same training run: placement and free keys may change. Fork starts another run from a
checkpoint: identity keys may change too, as long as every tensor keeps its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from phalanx.core.errors import PhalanxError, Problems
from phalanx.spec.job import Job, plain
from phalanx.spec.keys import KeyInfo, Mark
from phalanx.spec.names import key_at


class When(StrEnum):
    """The earliest occasion on which a key may change."""

    RESUME = "on resume"
    NAME = "by starting another job"
    JOURNAL = "during a run, by its journal"
    FORK = "on fork, besides all of these"
    NEVER = "never: they change the shapes of tensors"


FORKABLE = frozenset(When) - {When.NEVER}


def when(key: KeyInfo) -> When:
    """When a key of the job file may change."""
    if key.section == "job":
        return When.NAME
    if key.mark in (Mark.PLACEMENT, Mark.FREE):
        return When.RESUME
    if key.mark == Mark.JOURNALED:
        return When.JOURNAL
    return When.NEVER if key.changes_shapes else When.FORK


@dataclass(frozen=True, slots=True)
class Change:
    """A key that differs between two jobs; a value is None where there is none."""

    key: str
    before: Any
    after: Any
    when: When


def changes(before: Job, after: Job) -> tuple[Change, ...]:
    """The keys in which two jobs differ, by name. An identity key without effect in either counts as one that may
    change on resume, and so do digests of the data, which are compared with the data itself. A table or key that is
    left out and one without a value are the same.
    """
    old, new = dict(flattened(plain(before))), dict(flattened(plain(after)))
    counted = dict(flattened(before.identity())).keys() | dict(flattened(after.identity())).keys()
    return tuple(
        Change(name, old.get(name), new.get(name), _when(name, counted))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def _when(name: str, counted: frozenset[str] | set[str]) -> When:
    if name.startswith("storage."):
        return When.RESUME
    info = key_at(name)
    if info is None:
        return When.NEVER  # an argument of the user's own class: what it does to shapes nobody here knows
    found = when(info)
    return found if found in (When.RESUME, When.NAME) or name in counted else When.RESUME


def require_resumable(before: Job, after: Job) -> None:
    """Raises Problems that name each key with which `after` would not be the run that `before` is."""
    _require(before, after, frozenset({When.RESUME}), "the value with which the job was created", "fork the job")


def require_forkable(before: Job, after: Job) -> None:
    """Raises Problems that name each key with which the tensors of `before` don't fit into `after`."""
    remedy = "set it back, or start a new job"
    _require(before, after, FORKABLE, "the value of the job it is forked from, as it shapes tensors", remedy)


def _require(before: Job, after: Job, allowed: frozenset[When], expected: str, remedy: str) -> None:
    problems = [
        PhalanxError(
            change.key,
            value=change.after,
            expected=f"{expected}: {change.before!r}",
            remedy="submit it as another job" if change.when is When.NAME else remedy,
        )
        for change in changes(before, after)
        if change.when not in allowed
    ]
    if problems:
        raise Problems("job file", problems)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
