"""A real S3 server for tests: ministack, run from a virtual environment of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

START_S, STOP_S = 30.0, 10.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
OTHERS = ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE", "AWS_REGION")


class Endpoint(str):
    """The endpoint URL of a running server, and the variables with which a process uses it.

    credentials: all but the endpoint. environ: the endpoint too, for processes that get no StorageSettings.
    """

    credentials: Mapping[str, str]

    @property
    def environ(self) -> dict[str, str]:
        return {**self.credentials, "AWS_ENDPOINT_URL": str(self)}


def set_environ(patch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    """Sets `environ` and clears what else AWS clients would listen to."""
    for name in OTHERS:
        patch.delenv(name, raising=False)
    for name, value in environ.items():
        patch.setenv(name, value)


def executable() -> Path | None:
    """ministack's program.

    PHALANX_MINISTACK, or the one in `.venv-ministack` of the repository root; None if there is none.
    """
    named = os.environ.get("PHALANX_MINISTACK")
    path = Path(named) if named else Path(__file__).parents[2] / ".venv-ministack/bin/ministack"
    return path if path.is_file() else None


def required_executable() -> Path:
    """ministack's program; skips the test where there is none, and fails it under CI=true."""
    program = executable()
    if program is not None:
        return program
    reason = "no ministack: set PHALANX_MINISTACK or install it in .venv-ministack"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(program: Path, folder: Path) -> Iterator[Endpoint]:
    """Runs a server and yields its endpoint; its output goes to a log in `folder`, where no AWS files are."""
    port, log = free_port(), folder / "log"
    environ = os.environ | {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "S3_PERSIST": "0"}
    with log.open("wb") as output:
        server = subprocess.Popen([str(program)], env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/", server, log)
        endpoint = Endpoint(f"http://127.0.0.1:{port}")
        files = {"AWS_CONFIG_FILE": folder / "no-config", "AWS_SHARED_CREDENTIALS_FILE": folder / "no-credentials"}
        endpoint.credentials = CREDENTIALS | {name: str(path) for name, path in files.items()}
        yield endpoint
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert server.poll() is None, f"ministack ended: {log.read_text()}"
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"ministack was not up after {START_S} s: {log.read_text()}")


def make_bucket(endpoint: str, name: str) -> str:
    """Creates a bucket through a client that is not ours; returns its s3:// URL."""
    foreign_client(endpoint).create_bucket(Bucket=name)
    return f"s3://{name}"


@cache
def foreign_client(endpoint: str) -> Any:
    """A plain boto3 client."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
