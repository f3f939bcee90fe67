"""Whether a store keeps the promise that commits lean on: a create-only put. Tried with one small object before a run
starts; `phalanx doctor` tries more.
"""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from pathlib import Path

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore

LOG = logging.getLogger(__name__)
_FIRST, _SECOND = b"first", b"second"


def warnings_of(store: ObjectStore) -> tuple[str, ...]:
    """What must be told of `store`, which is rooted at a job; files and memory are create-only and not tried.

    Raises PhalanxError where the store does not give back what was written, or refuses it.
    """
    if store.url.startswith(("file:", "memory:")) or is_create_only(store):
        return ()
    return (
        f"{store.url} is single-writer, because it has no create-only put: "
        "let no two processes run this job at once, or what one of them commits may be lost",
    )


def require_writable(store: ObjectStore) -> None:
    """Raises what the store raises where it takes no object: StoreDenied, StoreError. Files alone are tried, as
    `warnings_of` writes to every other store; folders that were not there before are removed again.
    """
    if not store.url.startswith("file:"):
        return
    folder = Path(store.url.removeprefix("file://"))
    made = [each for each in (folder, *folder.parents) if not _is_there(each)]
    place = store.within(f"probe-{uuid.uuid4().hex}")
    try:
        place.create("object", _FIRST)
        _remove(place)
    finally:
        for each in made:
            with suppress(OSError):  # gone already, or another writer's objects are there meanwhile
                each.rmdir()


def _is_there(folder: Path) -> bool:
    """Whether there is such a folder, as far as we may know."""
    try:
        return folder.exists()
    except OSError:
        return True


def is_create_only(store: ObjectStore) -> bool:
    """Whether neither bytes nor an empty object replace one that is there; what was tried is removed again."""
    place = store.within(f"probe-{uuid.uuid4().hex}")
    try:
        place.create("object", _FIRST)
        _require(_FIRST, place)
        if not (_refuses(place, _SECOND) and _refuses(place, b"")):
            return False
        _require(_FIRST, place)
        return True
    finally:
        _remove(place)


def _require(data: bytes, place: ObjectStore) -> None:
    try:
        is_there = place.read("object") == data and [info.key for info in place.list()] == ["object"]
    except ObjectMissing:
        is_there = False
    if not is_there:
        raise PhalanxError(
            f"store {place.url}",
            expected="that an object which was created is listed, and read with its own bytes",
            remedy="see `phalanx doctor --storage URL`; checkpoints are not safe there",
        )


def _refuses(place: ObjectStore, data: bytes) -> bool:
    try:
        place.create("object", data)
    except ObjectExists:
        return True
    return False


def _remove(place: ObjectStore) -> None:
    """Rights without delete are enough to train."""
    try:
        place.delete("object")
    except (OutsideError, PhalanxError) as error:
        LOG.warning("the probe of %s stays behind: %s", place.url, error)
