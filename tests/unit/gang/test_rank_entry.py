"""Entries by name, errors as plain values, torchrun's variables."""

import json

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.gang.context import torchrun_context
from phalanx.gang.rank import describe, resolve
from phalanx.gang.rendezvous import prefix


@pytest.mark.parametrize("entry", ["no_such_module_here:f", "json:no_such_function", "json", ":f", ""])
def test_resolve_name_that_leads_nowhere_is_a_user_error(entry):
    with pytest.raises(PhalanxError, match=r"package\.module:function"):
        resolve(entry)


def test_resolve_name_gives_the_function():
    assert resolve("json:dumps") is json.dumps


def test_describe_error_is_json_with_its_chain():
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        told = json.loads(json.dumps(describe(error)))
    assert [message for _, message in told["chain"]] == ["outer", "'inner'"]
    assert "test_describe_error" in told["where"]
    assert "KeyError" in told["traceback"]


def test_torchrun_context_reads_the_launchers_variables(monkeypatch):
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    for name, value in {**variables, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    context = torchrun_context({"a": 1}, print)
    assert (context.rank, context.world_size, context.master_port) == (3, 4, 29500)
    assert context.attempt.endswith("_2") and context.uses_agent_store


def test_torchrun_context_missing_variable_is_named(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PhalanxError, match="RANK"):
        torchrun_context({}, print)


def test_prefix_of_another_world_size_under_one_restart_count_is_another(monkeypatch):
    launched = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    prefixes = []
    for world_size in ("4", "2", "2"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        prefixes.append(prefix(torchrun_context({}, lambda kind, **fields: None)))
    assert prefixes[0] != prefixes[1] == prefixes[2]
