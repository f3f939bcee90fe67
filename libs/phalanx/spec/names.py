"""Answers to a key that does not exist: the nearest right name, or what another system's setting is called here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from phalanx.core.errors import PhalanxError
from phalanx.spec.foreign import NO_EQUIVALENT, SAME_MEANING
from phalanx.spec.job import Job
from phalanx.spec.keys import KeyInfo, describe, walk_fields


@cache
def all_keys() -> tuple[KeyInfo, ...]:
    """Every key of the job file, in the order of the reference."""
    return tuple(describe(name, field) for name, field in walk_fields(Job))


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that does not exist. meant: the key that the user most likely means, dotted; None where nothing comes
    near."""

    name: str
    value: object
    meant: str | None

    @property
    def problem(self) -> PhalanxError:
        """The one line for the user."""
        hint = _lookup(NO_EQUIVALENT, self.name)
        if self.meant:
            remedy = f"did you mean {self.meant}?"
        else:
            remedy = hint or "remove it (`docs/job-file.md` lists every key)"
        return PhalanxError(self.name, value=self.value, expected="a key that the job file knows", remedy=remedy)


def unknown_key(name: str, value: object) -> UnknownKey:
    """Finds what `name` (dotted, as written) was meant to be."""
    meant = _lookup(SAME_MEANING, name)
    if meant is None and _lookup(NO_EQUIVALENT, name) is None:
        meant = _nearest(_normal(name))
    if meant is not None and name.startswith("storage."):
        meant = meant.replace("storage.NAME", name.rpartition(".")[0])
    return UnknownKey(name, value, None if meant == name else meant)


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _lookup(table: Mapping[str, str], name: str) -> str | None:
    """By the full name, then by its first part (a whole table of another system), then by its last."""
    full = _normal(name)
    return table.get(full) or table.get(full.partition(".")[0]) or table.get(full.rpartition(".")[2])


def _nearest(name: str) -> str | None:
    """The right name closest in spelling: first within the same table, then over full dotted names, then by the last
    part alone."""
    section, _, leaf = name.rpartition(".")
    siblings = {key.name.rpartition(".")[2]: key.name for key in all_keys() if _same_table(key.section, section)}
    full = {key.name: key.name for key in all_keys()}
    leaves = {key.name.rpartition(".")[2]: key.name for key in all_keys()}
    for wanted, known, cutoff in ((leaf, siblings, 0.6), (name, full, 0.75), (leaf, leaves, 0.75)):
        close = difflib.get_close_matches(wanted, known, n=1, cutoff=cutoff)
        if close:
            return (
                known[close[0]].replace("storage.NAME", section) if section.startswith("storage.") else known[close[0]]
            )
    return None


def _same_table(known: str, written: str) -> bool:
    return known == written or (known == "storage.NAME" and written.startswith("storage."))
