"""Lists of objects that a manifest names instead of the objects, so that its root stays small however many ranks saved.

A root names up to `MOST_NAMED` parts and as many records itself. Beyond that they stand in list objects of
`REFS_A_LIST` each, in the same order, and the root names the lists: 16,384 parts are 16 lists, 3 kB of the root.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from phalanx.core.digest import canonical_json
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.values import ObjectRef

FORMAT: Final = "phalanx.refs/1"
MOST_NAMED: Final = 64
REFS_A_LIST: Final = 1024
_DIGEST: Final = re.compile(r"xxh3:[0-9a-f]{32}")


def encoded_lists(refs: Sequence[ObjectRef]) -> Iterator[bytes]:
    """The lists that hold `refs`, in order."""
    for first in range(0, len(refs), REFS_A_LIST):
        rows = [
            {"key": ref.key, "num_bytes": ref.num_bytes, "digest": ref.digest}
            for ref in refs[first : first + REFS_A_LIST]
        ]
        yield canonical_json({"format": FORMAT, "refs": rows})


def decode_refs(key: str, data: bytes) -> tuple[ObjectRef, ...]:
    """What the list at `key` names. Raises DamagedObject for anything but what `encoded_lists` gives."""
    try:
        content = json.loads(data)
        refs = tuple(ObjectRef(row["key"], row["num_bytes"], row["digest"]) for row in content["refs"])
        is_whole = content["format"] == FORMAT and all(_DIGEST.fullmatch(ref.digest) for ref in refs)
        is_same = is_whole and next(encoded_lists(refs), b"") == data
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedObject(key, f"is no list of objects: {error!r}") from error
    if not is_same:
        raise DamagedObject(key, f"is not in the one byte form of {FORMAT!r}")
    return refs
