"""The digest of the code that trains, so that a checkpoint says what made it."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

ROOMS = ("core", "lineage", "models", "objects", "parallel", "snapshot", "spec", "stream", "trainer")


def code_digest() -> str:
    """SHA-256 over names and bytes of all sources of the rooms that run inside a rank."""
    import phalanx.core

    libs = resources.files(phalanx.core).joinpath("..")
    digest = hashlib.sha256()
    for room in ROOMS:
        _add(digest, libs.joinpath(room), room)
    return f"sha256:{digest.hexdigest()}"


def _add(digest: hashlib._Hash, folder: Traversable, name: str) -> None:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            _add(digest, entry, path)
        elif entry.name.endswith((".py", ".toml")):
            data = entry.read_bytes()
            digest.update(f"{path}\0{len(data)}\0".encode())
            digest.update(data)
