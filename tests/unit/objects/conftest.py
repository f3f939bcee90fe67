"""Stores of all three kinds, each test's below a prefix of its own, and one spoiling proxy for all."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.faulty_proxy import Proxy, proxying
from support.ministack import Endpoint

from phalanx.objects import ObjectStore, StorageSettings, open_store


@pytest.fixture(scope="session")
def s3_store(ministack: Endpoint, s3_bucket: str) -> ObjectStore:
    """The shared bucket, opened once."""
    return open_store(s3_bucket, StorageSettings(endpoint=ministack), deadline_s=20)


@pytest.fixture
def place(s3_bucket: str) -> str:
    """A fresh s3:// URL below the shared bucket."""
    return f"{s3_bucket}/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "file":
        return open_store(f"file://{tmp_path}/not/yet/there")
    if request.param == "memory":
        return open_store("memory://")
    opened: ObjectStore = request.getfixturevalue("s3_store")
    return opened.within(f"{uuid.uuid4().hex}/some/root")


@pytest.fixture
def open_place(place: str) -> Callable[..., ObjectStore]:
    """Opens this test's place through any endpoint, with a deadline."""

    def opened(endpoint: str, deadline_s: float = 10) -> ObjectStore:
        return open_store(place, StorageSettings(endpoint=endpoint), deadline_s)

    return opened


@pytest.fixture(scope="session")
def session_proxy(ministack: Endpoint) -> Iterator[Proxy]:
    """One proxy before the server."""
    with proxying(ministack) as running:
        yield running


@pytest.fixture
def proxy(session_proxy: Proxy, place: str) -> Iterator[Proxy]:
    """The proxy, for the requests of this test alone."""
    session_proxy.restart(place.rpartition("/")[2])
    yield session_proxy
    session_proxy.restart("behaves until the next test")
