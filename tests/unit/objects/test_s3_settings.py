"""S3 settings that no client can use are refused where the store is opened, in one line that says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ministack import CREDENTIALS, set_environ

from phalanx.objects import StorageSettings, StoreDenied, open_store


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials, and none of the machine's own settings."""
    set_environ(monkeypatch, CREDENTIALS | {"AWS_CONFIG_FILE": str(tmp_path / "config")})


def refusal(settings: StorageSettings | None = None) -> str:
    """What is said to whoever opens a bucket."""
    with pytest.raises(StoreDenied) as raised:
        open_store("s3://bucket", settings or StorageSettings(endpoint="http://127.0.0.1:9"))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("endpoint", ["http://host:abc", "http://127.0.0.1:99999", "http://host:-1", "ftp://host"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_endpoint_that_no_client_can_reach_is_named(
    endpoint: str, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_variable:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    told = refusal(StorageSettings(endpoint=None if by_variable else endpoint))
    assert told.startswith("s3://bucket: expected usable settings") and endpoint in told


def test_region_of_two_lines_is_refused_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us\neast")
    assert "'us east'" in refusal()


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("AWS_ACCESS_KEY_ID", "access_key"),
        ("AWS_SECRET_ACCESS_KEY", "secret_key"),
        ("AWS_SESSION_TOKEN", "token"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r", "\x1b[A"])
def test_credentials_with_control_characters_are_refused_and_not_shown(
    variable: str, field: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"confidential{end}x")
    told = refusal()
    assert "AWS credentials from env" in told and f"printable characters alone in {field}" in told
    assert "confidential" not in told


@pytest.mark.parametrize("content", [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_bundle_without_certificates_is_refused(content: bytes, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(content)
    told = refusal(StorageSettings(endpoint="https://127.0.0.1:9", ca_bundle=str(bundle)))
    assert told.startswith(f"ca_bundle is {str(bundle)!r}: expected a PEM file of certificates")
