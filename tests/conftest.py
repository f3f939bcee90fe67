"""Fixtures for every test: `ministack`, a real S3 server, and `s3_prefix`, a fresh place on it for this test."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator

import hypothesis
import pytest
from support import ministack as server

# How long an example takes says more of the machine than of the code; every test has its timeout all the same.
hypothesis.settings.register_profile("phalanx", deadline=None)
hypothesis.settings.load_profile("phalanx")

# Whoever starts the tests in the background of a shell has them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Endpoint]:
    """The endpoint URL of an S3 server, with `.environ` for other processes; credentials for it are set in this one.

    Skips where ministack is not installed; under CI=true that is a failure.
    """
    program = server.required_executable()
    folder = tmp_path_factory.mktemp("ministack")
    with pytest.MonkeyPatch.context() as patch, server.running(program, folder) as endpoint:
        server.set_environ(patch, endpoint.credentials)
        yield endpoint


@pytest.fixture(scope="session")
def s3_bucket(ministack: server.Endpoint) -> str:
    """The s3:// URL of a bucket that the tests of a session share; each keeps below a prefix of its own."""
    return server.make_bucket(ministack, f"tests-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def s3_prefix(ministack: server.Endpoint, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh `s3://bucket/<unique>` URL, with the AWS variables by which this process and its children reach it."""
    server.set_environ(monkeypatch, ministack.environ)
    return f"{s3_bucket}/{uuid.uuid4().hex}"
