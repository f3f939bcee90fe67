"""`phalanx doctor`: facts, the probe's table and verdict, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.ministack import Endpoint
from typer.testing import CliRunner

from phalanx.cli.doctor import register
from phalanx.objects import StoreDenied
from phalanx.objects.memory import MemoryStore


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    return app


def test_doctor_alone_shows_the_machine(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in result.output
    assert "torch" in result.output


def test_doctor_json_is_one_object(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--storage", f"file://{tmp_path}"])
    assert result.exit_code == 0
    told = json.loads(result.output)
    assert told["machine"]["cores"] >= 1
    assert told["storage"]["promise"] == "full"
    assert list(tmp_path.iterdir()) == []


def test_doctor_s3_shows_table_and_verdict(
    app: typer.Typer, ministack: Endpoint, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    result = CliRunner().invoke(app, ["doctor", "--storage", s3_prefix, "--endpoint", ministack])
    assert result.exit_code == 0, result.output
    assert "one of 20 racing writers won" in " ".join(result.output.split())
    assert "full: commits are safe" in result.output


def test_doctor_store_without_create_only_exits_1(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: MemoryStore, key: str, data: bytes) -> None:
        self._objects[key] = bytes(data)

    monkeypatch.setattr(MemoryStore, "create", create)
    result = CliRunner().invoke(app, ["doctor", "--storage", "memory://"])
    assert result.exit_code == 1
    assert "single-writer: " in result.output


def test_doctor_wrong_url_is_the_users_error(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["doctor", "--storage", "ftp://x"])
    assert isinstance(result.exception, StoreDenied)


def test_doctor_does_not_import_torch() -> None:
    code = "import sys; from phalanx.cli.doctor import doctor; doctor(as_json=True); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
