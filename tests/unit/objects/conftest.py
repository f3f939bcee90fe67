"""Stores of all three kinds, and a fresh bucket, for the tests of this room."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ministack import make_bucket

from phalanx.objects import ObjectStore, StorageSettings, open_store


@pytest.fixture
def bucket(ministack: str) -> str:
    """The s3:// URL of an empty bucket."""
    return make_bucket(ministack, f"bucket-{uuid.uuid4().hex[:12]}")


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "file":
        return open_store(f"file://{tmp_path}/not/yet/there")
    if request.param == "memory":
        return open_store("memory://")
    endpoint, url = request.getfixturevalue("ministack"), request.getfixturevalue("bucket")
    return open_store(f"{url}/some/root", StorageSettings(endpoint=endpoint), deadline_s=20)


@pytest.fixture
def open_bucket(bucket: str) -> Callable[..., ObjectStore]:
    """Opens the bucket through any endpoint, with a deadline."""

    def opened(endpoint: str, deadline_s: float = 10) -> ObjectStore:
        return open_store(bucket, StorageSettings(endpoint=endpoint), deadline_s)

    return opened
