"""WebDataset samples: members of a tar with one key, next to each other; each sample is a document.

A member's name is split at the first dot of its last part: before it lies the key, behind it the field, so
`a/v1.2_doc.json` is the field `2_doc.json` of the sample `a/v1`. The document's text is the field `txt`, else the text
field of the JSON object in the field `json`, else of the one field that ends in `.txt` or `.json`; its id is the JSON
object's, else `<path of the tar>:<key>`. Other fields are passed over. A sample without any of these is a document
without text. Hidden members (a last part that begins with a dot) are left out, as hidden files are.

Two members of one name, and a key that comes again after another one, raise with both offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.documents import Fields, RawDocument, parse_record
from phalanx.data.prepare.inputs.keys import KeyLog
from phalanx.data.prepare.inputs.tar import Member, TarStream

_TEXT, _JSON = "txt", "json"


@dataclass(slots=True)
class _Sample:
    """Members so far: by field, and the data of those that may hold the text or the id (None: a link has none)."""

    key: str
    members: dict[str, Member] = field(default_factory=dict)
    data: dict[str, bytes | None] = field(default_factory=dict)


def tar_documents(stream: BinaryIO, path: str, location: str, fields: Fields) -> Iterator[RawDocument]:
    """The documents of a tar, in order; path: how ids call it, location: how errors do.

    Raises CorruptInput, and PhalanxError for samples that no reader can put together.
    """
    for sample in _samples(TarStream(stream, location), location):
        yield _document(sample, path, location, fields)


def split_name(name: str) -> tuple[str, str]:
    """Key and field of a member's name."""
    folder, slash, last = name.removeprefix("./").rpartition("/")
    key, _, extension = last.partition(".")
    return folder + slash + key, extension


def _samples(tar: TarStream, location: str) -> Iterator[_Sample]:
    log, sample = KeyLog(), None
    for member in tar:
        if member.name.rpartition("/")[2].startswith("."):
            continue
        key, extension = split_name(member.name)
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
            log.add(key, member.offset)
        elif extension in sample.members:
            raise _twice(
                location, f"one member called {member.name!r}", sample.members[extension].offset, member.offset
            )
        sample.members[extension] = member
        if _rank(extension) is not None:
            sample.data[extension] = None if member.is_link else tar.read(member)
    if sample is not None:
        yield sample
    again = log.first_repeated()
    if again:
        raise _twice(location, "the members of a sample next to each other", *again)


def _rank(extension: str) -> int | None:
    """0, 1, 2: how early a field is asked for text; None: never."""
    if extension in (_TEXT, _JSON):
        return 0 if extension == _TEXT else 1
    return 2 if extension.rpartition(".")[2] in (_TEXT, _JSON) else None


def _document(sample: _Sample, path: str, location: str, fields: Fields) -> RawDocument:
    chosen = min(sample.data, key=lambda name: _rank(name) or 0, default=None)
    if chosen is None:
        return RawDocument(f"{path}:{sample.key}", None, 0)
    same = [sample.members[name].offset for name in sample.data if _rank(name) == _rank(chosen)]
    if len(same) > 1:
        raise _twice(location, f"one .txt or .json member in the sample {sample.key!r}", same[0], same[1])
    data, place = sample.data[chosen], f"{path}:{sample.key}"
    if data is None:
        return RawDocument(place, None, 0)
    if chosen.rpartition(".")[2] == _TEXT:
        described = sample.data.get(_JSON)
        record = parse_record(described) if described else {}
        found = fields.document({} if isinstance(record, str) else record, place, 0)
        return RawDocument(found.id, data, len(data), lacks_id=found.lacks_id)
    record = parse_record(data)
    if isinstance(record, str):
        return RawDocument(place, None, len(data), problem=record)
    return fields.document(record, place, len(data))


def _twice(location: str, expected: str, first: int, second: int) -> PhalanxError:
    return PhalanxError(
        location,
        expected=expected,
        remedy=f"they lie at bytes {first} and {second} of the tar: write it again with each sample's members together",
    )
