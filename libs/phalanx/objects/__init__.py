"""Object storage by URL.

Immutable objects, created exactly once, on files, in memory or on S3 (contract in `base.py`).
"""

from phalanx.objects.base import (
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectWriter,
    StorageSettings,
    StoreDenied,
    StoreError,
    Upload,
)
from phalanx.objects.open import fsspec_options, open_store

__all__ = [
    "ObjectExists",
    "ObjectInfo",
    "ObjectMissing",
    "ObjectStore",
    "ObjectWriter",
    "StorageSettings",
    "StoreDenied",
    "StoreError",
    "Upload",
    "fsspec_options",
    "open_store",
]
