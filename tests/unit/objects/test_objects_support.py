"""The fixtures that other rooms build on: a place on S3 for this process and its children, and no silent skip in CI."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ministack as server

from phalanx.objects import open_store

WRITE = "import sys; from phalanx.objects import open_store; open_store(sys.argv[1]).create('from/child', b'1')"


def test_s3_prefix_is_empty_and_open_to_subprocesses(s3_prefix: str) -> None:
    store = open_store(s3_prefix)
    assert list(store.list()) == []
    subprocess.run([sys.executable, "-c", WRITE, s3_prefix], check=True, timeout=60)
    assert store.read("from/child") == b"1"


@pytest.mark.parametrize("ci, outcome", [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_ministack_missing_skips_but_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("PHALANX_MINISTACK", "/no/such/program")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="PHALANX_MINISTACK"):
        server.required_executable()
