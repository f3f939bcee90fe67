"""No credential where others could read it: argv, environments, logs, job files, events, databases, storage."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ministack as s3
from support.jobs import PREPARE, run_cli, wait_until, write_corpus, write_job
from support.services import Services, services, wait_for_step

from phalanx import Client
from phalanx.lineage.events import JobState
from phalanx.rpc import Unavailable

S3_SECRET = "wJalrXUtnFEMI-phalanx-secret-of-this-test"
TOKEN = re.compile(rb"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{40,}")
PRIVATE = ("tokens", "keys")


def secrets_of(running: Services) -> list[bytes]:
    """Every secret of a home, as bytes by which it is found: tokens, and lines of private keys; and the store's."""
    home = running.home
    tokens = [path.read_bytes().strip() for path in (home.folder / "tokens").iterdir()]
    keys = [*home.pki.glob("*.key"), home.authority]
    lines = [path.read_bytes().splitlines()[1] for path in keys]
    assert len(tokens) == 4 and len(lines) >= 9 and all(len(each) > 30 for each in (*tokens, *lines))
    return [*tokens, *lines, S3_SECRET.encode()]


def processes() -> Iterator[tuple[str, bytes]]:
    """argv and environment of every process there is, but this one's own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for name in ("cmdline", "environ"):
                try:
                    yield f"{entry}/{name}", (entry / name).read_bytes()
                except OSError:
                    continue


def files(folder: Path, running: Services, given: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below, but those that are there to hold a secret."""
    home = running.home
    for path in folder.rglob("*"):
        is_private = any(home.folder / each in path.parents for each in PRIVATE) or path == given
        if path.is_file() and not is_private and not (path.parent == home.pki and path.suffix == ".key"):
            yield str(path), path.read_bytes()


def objects(ministack: str, url: str) -> Iterator[tuple[str, bytes]]:
    """Every object below the URL, read by a client that is not ours."""
    client = s3.foreign_client(ministack)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            yield entry["Key"], client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()


def assert_clean(found: Iterator[tuple[str, bytes]], secrets: list[bytes], at_least: int) -> None:
    """Fails with the place, never with the secret."""
    number = 0
    for place, data in found:
        number += 1
        held = [index for index, secret in enumerate(secrets) if secret in data]
        assert not held, f"{place} holds secret {held}"
        assert not TOKEN.search(data), f"{place} holds a signed token"
    assert number >= at_least, number


def is_second_attempt(client: Client) -> bool:
    """Whether it runs, as far as train can be asked."""
    try:
        job = client.job("tiny")
    except Unavailable:
        return False
    return job.attempt == 2 and job.state is JobState.RUNNING


@pytest.mark.timeout(240)
def test_no_credential_is_anywhere_during_and_after_a_run_on_s3(
    s3_prefix: str, ministack: s3.Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "aws-credentials"
    given.write_text(f"[default]\naws_access_key_id = test\naws_secret_access_key = {S3_SECRET}\n")
    given.chmod(0o600)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(given))
    prepared = run_cli(["data", "prepare", write_corpus(tmp_path / "text"), "--out", f"{s3_prefix}/data", *PREPARE])
    assert prepared.code == 0, prepared.err
    path = write_job(tmp_path, f"{s3_prefix}/data", steps=1_000_000)
    path.write_text(path.read_text().replace(f"{tmp_path.as_uri()}/store", f"{s3_prefix}/store"))
    store = ("--storage", f"{s3_prefix}/cluster", "--storage-endpoint", str(ministack))
    with services(tmp_path / "home", *store, slots=2) as running, running.client() as client:
        secrets = secrets_of(running)
        client.submit(path)
        wait_for_step(client, "tiny", 4)
        assert_clean(processes(), secrets, 20)
        os.kill(running.ranks()[0], signal.SIGKILL)  # a second attempt, with a token of its own
        running.kill("train")
        wait_until(lambda: is_second_attempt(client), 60, "no second attempt")
        assert_clean(processes(), secrets, 20)
        client.stop("tiny")
        assert client.wait("tiny", 90).state is JobState.STOPPED
        running.cli("job", "logs", "tiny")
        assert_clean(processes(), secrets, 20)
        assert_clean(files(tmp_path, running, given), secrets, 30)
        assert_clean(objects(ministack, s3_prefix), secrets, 20)
    assert_clean(files(tmp_path, running, given), secrets, 30)
