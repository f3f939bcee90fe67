"""Small stored objects: canonical JSON in an envelope that names the format and the content's digest; reading is
strict.

One rule finds every foreign or damaged object: what was read, written again, must give the very bytes that were read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from phalanx.core.digest import BytesLike, canonical_json, digest_of
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.values import Attempt, JobRecord, JournalEntry, Manifest

Stored = TypeVar("Stored", JobRecord, Attempt, JournalEntry, Manifest)

FORMATS: Final = {
    JobRecord: "phalanx.job/1",
    Attempt: "phalanx.attempt/1",
    JournalEntry: "phalanx.journal-entry/1",
    Manifest: "phalanx.manifest/1",
}
_MANIFEST_ADDITIONS: Final = (  # without them a manifest is as it was before there were any
    "speculative",
    "metrics",
    "part_lists",
    "record_lists",
    "directory",
)
_ADAPTERS: Final[Mapping[type, TypeAdapter[Any]]] = {kind: TypeAdapter(kind) for kind in FORMATS}


def encode(value: JobRecord | Attempt | JournalEntry | Manifest) -> bytes:
    """The bytes that store `value`."""
    content = asdict(value)
    if isinstance(value, JobRecord):
        if value.origin is None:
            del content["origin"]  # as it was before there were forks
        else:
            content["origin"] = value.origin.plain()
    if isinstance(value, Manifest):
        content = {name: kept for name, kept in content.items() if kept or name not in _MANIFEST_ADDITIONS}
    return canonical_json({"format": FORMATS[type(value)], "digest": digest_of(content), "content": content})


def decode(kind: type[Stored], key: str, data: BytesLike) -> Stored:
    """The value stored at `key`. Raises DamagedObject for anything but what `encode` wrote, and says what is wrong."""
    try:
        envelope = json.loads(bytes(data), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedObject(key, f"is not JSON: {error}") from error
    if not isinstance(envelope, dict) or envelope.keys() != {"format", "digest", "content"}:
        raise DamagedObject(key, "is not an object of Phalanx: expected exactly format, digest and content")
    if envelope["format"] != FORMATS[kind]:
        raise DamagedObject(key, f"has the format {envelope['format']!r}; this version reads {FORMATS[kind]!r}")
    return _validated(kind, key, bytes(data), envelope)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON number")


def _digest_or_none(content: dict[str, object]) -> str | None:
    try:
        return digest_of(content)
    except UnicodeEncodeError:
        return None


def _validated(kind: type[Stored], key: str, data: bytes, envelope: dict[str, object]) -> Stored:
    content = envelope["content"]
    if not isinstance(content, dict) or _digest_or_none(content) != envelope["digest"]:
        raise DamagedObject(key, f"is damaged: its content does not have the digest {envelope['digest']!r}")
    try:
        value: Stored = _ADAPTERS[kind].validate_json(canonical_json(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedObject(key, f"has a wrong field {where}: {first['msg']}") from error
    if encode(value) != data:
        raise DamagedObject(key, f"is not in the one byte form of {FORMATS[kind]!r} (unknown fields or other spacing)")
    return value
