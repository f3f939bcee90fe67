"""The page of layouts says what the parity tests run, no more and no less."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "contract_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_contract_is_that_of_the_tests(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run python scripts/contract_table.py"


def test_a_page_that_says_something_else_is_not_fresh(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "layouts.md"
    page.parent.mkdir()
    page.write_text(script.PAGE.read_text().replace("| 2 | dp_shard 2, zero 1 |", "| 2 | dp_shard 2, zero 2 |", 1))
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "FOLDERS", tuple(str(SCRIPT.parents[1] / folder) for folder in script.FOLDERS))
    assert script.main(["--check"]) == 1
    assert "docs/layouts.md is not fresh" in capsys.readouterr().err
    assert script.main([]) == 0 and script.main(["--check"]) == 0
