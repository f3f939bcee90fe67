"""Storage and a checkpoint service for the tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from checkpoint_process import Service
from support.checkpoints import register
from support.ministack import set_environ

from phalanx.lineage.registry import RegisteredJob


@pytest.fixture(params=["file", "s3"], scope="module")
def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty cluster root."""
    if request.param == "file":
        yield f"file://{tmp_path_factory.mktemp('store')}"
        return
    endpoint, bucket = request.getfixturevalue("ministack"), request.getfixturevalue("s3_bucket")
    with pytest.MonkeyPatch.context() as patch:
        set_environ(patch, endpoint.environ)
        yield f"{bucket}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, storage: str) -> Iterator[Service]:
    """A service that has started, collecting only when asked, without a grace; shared by the tests of a module."""
    service = Service(tmp_path_factory.mktemp("service"), storage, {"grace_s": 0.0, "interval_s": 3600.0})
    try:
        service.start()
        yield service
    finally:
        service.close()


NewJob = Callable[..., RegisteredJob]


@pytest.fixture
def new_job(service: Service) -> NewJob:
    """Registers jobs under fresh names; keywords are keys of `[checkpoint]`."""
    return lambda **settings: register(service.root, f"j-{uuid.uuid4().hex[:8]}", **settings)
