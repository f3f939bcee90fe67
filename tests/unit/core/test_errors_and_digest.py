"""One line for each mistake; digests that carry their algorithm."""

from __future__ import annotations

import copy

import pytest

from phalanx.core.digest import canonical_json, digest_of, sha256, xxh3
from phalanx.core.errors import OutsideError, PhalanxError, Problems


def test_error_says_where_value_expectation_and_remedy_in_one_line():
    error = PhalanxError("parallel.tp", value=3, expected="a divisor of 4", remedy="set 2")
    assert str(error) == "parallel.tp is 3: expected a divisor of 4; set 2"
    assert str(PhalanxError("x", expected="a value", remedy="give one")) == "x: expected a value; give one"


def test_problems_say_each_mistake_on_a_line_of_its_own():
    problems = [PhalanxError(name, expected="y", remedy="z") for name in "ab"]
    assert str(Problems("job.toml", problems)) == "a: expected y; z\nb: expected y; z"


def test_digests_are_the_published_ones():
    assert sha256(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert xxh3(b"") == "xxh3:99aa06d3014798d86001c324468d497f"


def test_canonical_json_does_not_depend_on_the_order_of_keys_and_refuses_nan():
    assert canonical_json({"b": 1, "a": "ä"}) == '{"a":"ä","b":1}'.encode()
    assert digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize(
    "error",
    [
        PhalanxError("key", value=3, expected="4", remedy="set it"),
        Problems("file", [PhalanxError("key", expected="4", remedy="set it")]),
        OutsideError("disk on fire"),
    ],
)
def test_errors_copied_say_the_same(error: Exception) -> None:
    """As for another process: torch hands what one rank raised to all others."""
    found = copy.copy(error)
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)
