"""Fixtures for every test: `ministack`, a real S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support import ministack as server


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint URL of an S3 server; AWS credentials for it are set for the whole session.

    Skips where ministack is not installed; under CI=true that is a failure.
    """
    program = server.executable()
    if program is None:
        reason = "no ministack: set PHALANX_MINISTACK or install it in .venv-ministack"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in server.CREDENTIALS.items():
            patch.setenv(name, value)
        folder = tmp_path_factory.mktemp("ministack")
        patch.setenv("AWS_CONFIG_FILE", str(folder / "no-config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "no-credentials"))
        with server.running(program, folder / "log") as endpoint:
            yield endpoint
