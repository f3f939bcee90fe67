"""The page of layouts has the generated rows, each with what came of it, and says so when it has not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "layout_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layout_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the page without any outcome."""
    copy = tmp_path / "docs" / "layouts.md"
    copy.parent.mkdir()
    copy.write_text(f"Before.\n{script.BEGIN}\n{script.END}\nAfter.\n")
    monkeypatch.setattr(script, "PAGE", copy)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "FOLDERS", tuple(str(SCRIPT.parents[1] / folder) for folder in script.FOLDERS))
    return copy


def _outcomes(script: ModuleType, path: Path, problems: dict[int, list[str]]) -> str:
    axes: Any = script._axes()
    rows = [[row[axis] for axis in axes.AXES] for row in axes.layouts().rows]
    told = [
        {"row": row, "fp32": [2e-7, 3e-7], "narrow": [2e-5, 1e-2] if number % 2 else None}
        | {"problems": problems.get(number, [])}
        for number, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in told))
    return str(path)


def test_outcomes_of_a_run_fill_the_page_and_stay_there(script: ModuleType, page: Path, tmp_path: Path) -> None:
    assert script.main([_outcomes(script, tmp_path / "outcomes", {})]) == 0
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("\nAfter.\n")
    assert "| 1 | one rank | - | 2e-07, 3e-07 | - | equal |" in text
    assert text.count("| equal |") == len(script._axes().layouts().rows)
    assert "`attn_backend` flex | model.attn_backend is 'flex': expected sdpa or varlen" in text
    assert script.main(["--check"]) == 0 and script.main([]) == 0 and page.read_text() == text


def test_layout_that_differs_is_on_the_page_and_fails(
    script: ModuleType, page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([_outcomes(script, tmp_path / "outcomes", {0: ["loss of step 2 off by 1e-3"]})]) == 1
    assert "| 1 | one rank | - | 2e-07, 3e-07 | - | loss of step 2 off by 1e-3 |" in page.read_text()
    assert script.main(["--check"]) == 1
    assert "one rank | - | 2e-07, 3e-07 | - | loss of step 2" in capsys.readouterr().err


def test_row_that_was_never_run_fails(
    script: ModuleType, page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = Path(_outcomes(script, tmp_path / "outcomes", {}))
    outcomes.write_text("".join(outcomes.read_text().splitlines(keepends=True)[1:]))
    assert script.main(["--check"]) == 1
    assert "is not fresh" in capsys.readouterr().err
    assert script.main([str(outcomes)]) == 1
    assert "| 1 | one rank | - | - | - | not run |" in page.read_text()


def test_page_has_the_layouts_and_the_refusals_of_today(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = script.PAGE.read_text()
    copy = tmp_path / "layouts.md"
    copy.write_text(told)
    monkeypatch.setattr(script, "PAGE", copy)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "FOLDERS", tuple(str(SCRIPT.parents[1] / folder) for folder in script.FOLDERS))
    script.main([])
    assert copy.read_text() == told, "run python scripts/layout_table.py"
