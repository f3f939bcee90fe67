"""The one way in which commands print."""

from __future__ import annotations

import json

import pytest

from phalanx.cli.output import print_facts, print_json, print_table


def test_table_shows_each_kind_of_value_whole_and_takes_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.0[0:512,0:2048]/" + "x" * 200
    rows = [(name, 1234567, 0.123456, True, ("a", "b"), None, "[bold]")]
    print_table(("name", "count", "share", "ok", "parts", "gone", "text"), rows, "what [red]is")
    out = capsys.readouterr().out
    for shown in (name, "1,234,567", "0.1235", "True", "a, b", "None", "[bold]", "what [red]is"):
        assert shown in out
    assert len(out.splitlines()) == 3


def test_facts_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"steps": 20, "layouts": ["pp=2", "tp=2"]}, "a run")
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["steps", "20"],
        ["layouts", "pp=2,", "tp=2"],
    ]


def test_json_is_one_object_and_refuses_what_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, None], "b": 0.5})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None], "b": 0.5}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"loss": float("nan")})
