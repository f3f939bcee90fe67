"""Values of a state dict as JSON: the same Python value comes back, and what JSON cannot hold is refused by name."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest
import torch
from dcp_kit import same
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import Problems
from phalanx.snapshot import DamagedCheckpoint
from phalanx.snapshot.dcp.values import Values, decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), TREES, max_size=4))
def test_values_written_and_read_are_the_same(values: dict[str, object]) -> None:
    found = decode("key", encode(Values(values, {})))
    assert same(found.values, values)


def test_values_not_a_number_and_paths_come_back() -> None:
    found = decode("key", encode(Values({"x": math.nan}, {"g.0.lr": ("g", 0, "lr")})))
    value = found.values["x"]
    assert isinstance(value, float) and math.isnan(value)
    assert found.paths == {"g.0.lr": ("g", 0, "lr")}


class _Colour(enum.IntEnum):
    RED = 1


def test_values_that_json_lacks_are_refused_all_by_name() -> None:
    refused = {
        "rng": b"\x00",
        "when": {1: 2},
        "rate": np.float64(0.5),
        "colour": _Colour.RED,
        "dtype": torch.float32,
        "deep": [1, (2, {"k": {3}})],
        "text": "\ud800",
    }
    with pytest.raises(Problems) as caught:
        encode(Values({**refused, "fine": 1}, {}))
    assert [problem.where for problem in caught.value.problems] == list(refused)
    assert "numpy.float64" in str(caught.value) and "builtins.set" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        b"[]",
        b'{"format":"phalanx.values/2","paths":{},"values":{}}',
        b'{"format":"phalanx.values/1","paths":{},"values":{"x":{"code":"boom"}}}',
        b'{"format":"phalanx.values/1","paths":{},"values":{"x":{"float":"one"}}}',
        b'{"format":"phalanx.values/1","paths":{"x":[]},"values":{}}',
        b'{"format":"phalanx.values/1","paths":{},"values":[]}',
        b'{"format":"phalanx.values/1","paths":{},"values":{"x":{}}}',
    ],
)
def test_values_object_that_is_no_such_is_damage_that_names_it(data: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match="the-key"):
        decode("the-key", data)
