"""Opens a store by its URL, and says how other libraries open the same URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from phalanx.objects.base import ObjectStore, StorageSettings, StoreDenied
from phalanx.objects.file import FileStore
from phalanx.objects.memory import MemoryStore

_FORMS = "file:///absolute/folder, file://./relative/folder or s3://bucket/prefix"


def open_store(url: str, settings: StorageSettings | None = None, deadline_s: float = 60) -> ObjectStore:
    """The store at `url`; nothing is read or written yet.

    url: `file:///folder`, `file://./folder` and `file://~/folder` (taken literally, no %-escapes),
    `s3://bucket/prefix`, or `memory://` (each call a fresh, empty one). settings: for s3. deadline_s: how long one
    call may take, retries included; an upload or read of very large objects gets more by its size. Raises StoreDenied
    for a URL of another kind and for missing credentials.
    """
    if not isinstance(url, str):
        raise StoreDenied("storage URL", value=str(url), expected=_FORMS, remedy="give it as text")
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "file":
        return FileStore(_folder(url, rest))
    if separator and scheme == "memory":
        return MemoryStore(url)
    if separator and scheme == "s3":
        from phalanx.objects.s3 import S3Store

        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise StoreDenied("storage URL", value=url, expected="s3://bucket/prefix", remedy="name the bucket")
        store: ObjectStore = S3Store(bucket, settings or StorageSettings(), deadline_s)
        return store.within(prefix) if prefix.strip("/") else store
    raise StoreDenied("storage URL", value=url, expected=_FORMS, remedy="write one of these forms")


def _folder(url: str, rest: str) -> Path:
    """The absolute folder that the part behind `file://` means."""
    head = rest.split("/", 1)[0]
    if head == "localhost":
        rest = rest.removeprefix("localhost")
    elif head not in ("", ".", "..", "~") or not rest:
        raise StoreDenied(
            "storage URL",
            value=url,
            expected="file:///absolute/folder or file://./relative/folder",
            remedy=f"write file://./{rest}",
        )
    return Path(os.path.abspath(Path(rest).expanduser()))  # noqa: PTH100 - resolve() would follow links that the user chose


def fsspec_options(url: str, settings: StorageSettings | None = None) -> dict[str, Any]:
    """Options with which `fsspec` (and so `webdataset`) opens `url` by the same endpoint, credentials and trust as
    `open_store`.

    Holds no secret: s3fs finds the credentials by the same chain. Listings are never cached. Raises StoreDenied for
    `memory://`, whose objects belong to one store instance.
    """
    scheme = url.partition("://")[0]
    if scheme == "file":
        return {}
    if scheme == "s3":
        from phalanx.objects.s3_client import s3fs_options

        return s3fs_options(url.removeprefix("s3://").partition("/")[0], settings or StorageSettings())
    raise StoreDenied(
        "storage URL", value=url, expected="file:// or s3:// for reading by other libraries", remedy="use a file:// URL"
    )
