"""Numbers in the keys of storage."""

from __future__ import annotations

import pytest

from phalanx.core.numbering import LARGEST, numbered
from phalanx.lineage import keys


@pytest.mark.parametrize("text", ["0", "7", "00000007", str(LARGEST)])
def test_numbered_text_of_up_to_8_digits_is_its_number_which_a_key_holds(text: str) -> None:
    found = numbered(text)
    assert found == int(text) and keys.number(found) == f"{int(text):08d}"


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1.0", "1e3", "²", "٣", str(LARGEST + 1), "9" * 5000])
def test_numbered_text_of_any_other_kind_is_none(text: str) -> None:
    assert numbered(text) is None
