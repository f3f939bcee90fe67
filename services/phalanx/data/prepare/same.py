"""Objects whose bytes follow from the input: created once, found again by whoever starts over."""

from __future__ import annotations

from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectExists, ObjectStore


def create_same(store: ObjectStore, key: str, data: bytes) -> None:
    """Creates an object, or accepts one that already holds these bytes; raises PhalanxError where it holds others."""
    try:
        store.create(key, data)
    except ObjectExists:
        if store.read(key) != data:
            raise differs(store, key) from None


def differs(store: ObjectStore, key: str) -> PhalanxError:
    """The error for an output folder that holds what another input or other settings made."""
    return PhalanxError(
        f"{store.url}/{key}",
        expected="what this input and these settings give",
        remedy="it holds another dataset, or the input has changed since: name an empty --out folder",
    )
