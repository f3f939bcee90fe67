"""A real Ceph object store for tests, where one can be had.

PHALANX_CEPH_RGW: a program that answers `up DIR` (brings one up at 127.0.0.1:7480, key `test`, secret `testtest`; where
radosgw is not installed it installs it first) and `down DIR`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.ministack import Endpoint

ADDRESS = ("127.0.0.1", 7480)
START_S, INSTALL_S, END_S = 100.0, 300.0, 30.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def running() -> Iterator[Endpoint]:
    """The endpoint of a store that was brought up; skips where none can be had."""
    program = os.environ.get("PHALANX_CEPH_RGW")
    if not program:
        pytest.skip("no PHALANX_CEPH_RGW that would bring up a Ceph object store")
    if _is_taken():
        pytest.skip(f"something listens on {ADDRESS[0]}:{ADDRESS[1]}, where the Ceph object store would")
    is_installed = shutil.which("radosgw") is not None
    folder = tempfile.mkdtemp(prefix="phalanx-ceph-")
    try:
        _bring_up(program, folder, is_installed=is_installed)
        endpoint = Endpoint(f"http://{ADDRESS[0]}:{ADDRESS[1]}")
        files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), f"{folder}/none")
        endpoint.credentials = CREDENTIALS | files
        yield endpoint
    finally:
        pids = [int(path.read_text()) for path in Path(folder, "run").glob("*.pid")]
        subprocess.run([program, "down", folder], capture_output=True, timeout=60, check=False)
        _wait_ended(pids)
        shutil.rmtree(folder, ignore_errors=True)


def _bring_up(program: str, folder: str, *, is_installed: bool) -> None:
    log = Path(folder).with_suffix(".log")
    try:
        with log.open("wb") as output:  # no pipe: what it starts keeps it
            limit_s = START_S if is_installed else INSTALL_S
            done = subprocess.run([program, "up", folder], stdout=output, stderr=output, timeout=limit_s, check=False)
        told = log.read_text()[-2000:]
    except subprocess.TimeoutExpired:
        if is_installed:
            raise
        pytest.skip(f"radosgw is not installed, and {program} did not install it within {INSTALL_S:g} s")
    finally:
        log.unlink()
    if done.returncode and not is_installed:
        pytest.skip(f"radosgw is not installed and {program} could not install it: {told}")
    assert done.returncode == 0, told


def _is_taken() -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(ADDRESS) == 0


def _wait_ended(pids: list[int]) -> None:
    end_s = time.monotonic() + END_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end_s, f"processes of the Ceph object store did not end: {pids}"
        time.sleep(0.1)


def make_bucket(endpoint: Endpoint, name: str) -> str:
    """Creates a bucket through a client that is not ours; returns its s3:// URL."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=str(endpoint),
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=name)
    return f"s3://{name}"
