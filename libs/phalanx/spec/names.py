"""Answers to a key that does not exist: the nearest right name, or what another system's setting is called here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from phalanx.core.errors import PhalanxError
from phalanx.spec.foreign import NO_EQUIVALENT, SAME_MEANING
from phalanx.spec.job import Job
from phalanx.spec.keys import BY_NAME, OWN_BY_NAME, KeyInfo, describe, walk_fields


@cache
def all_keys() -> tuple[KeyInfo, ...]:
    """Every key of the job file, in the order of the reference."""
    return tuple(describe(name, field) for name, field in walk_fields(Job))


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], KeyInfo], ...]:
    """The names of keys below tables of the user's own naming, and of those that hold tables themselves."""
    return tuple(
        (re.compile(_pattern(key.name) + (r"(\..+)?" if _holds_tables(key) else "")), key)
        for key in all_keys()
        if "NAME" in key.name.split(".") or _holds_tables(key)
    )


def _holds_tables(key: KeyInfo) -> bool:
    return key.type_text in (BY_NAME, *OWN_BY_NAME.values())


def _pattern(name: str) -> str:
    return r"\.".join(".+" if part == "NAME" else re.escape(part) for part in name.split("."))


@cache
def _by_name() -> Mapping[str, KeyInfo]:
    return {key.name: key for key in all_keys()}


def key_at(name: str) -> KeyInfo | None:
    """The key that `name` (dotted, as written) is; None where there is none."""
    found = _by_name().get(name)
    return found or next((key for pattern, key in _patterns() if pattern.fullmatch(name)), None)


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
    if meant is not None:
        meant = _beside(meant, name.rpartition(".")[0])
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
            return _beside(known[close[0]], section)
    return None


def _beside(known: str, section: str) -> str:
    """A key of a table that the user has named, under that name."""
    table, _, leaf = known.rpartition(".")
    return f"{section}.{leaf}" if "NAME" in known and _same_table(table, section) else known


def _same_table(known: str, written: str) -> bool:
    return known == written or ("NAME" in known.split(".") and re.fullmatch(_pattern(known), written) is not None)
