"""The tokenizer of an export: one that is the data's, and opens."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.target import TrainedWith, tokenizer_files
from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError

EMPTY = b'{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


@pytest.mark.parametrize("data", [b"", b"no JSON", b"\xff\xfe", b"[]", b"{}", b'{"model": 7}'])
def test_a_tokenizer_that_does_not_open_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(PhalanxError, match=r"^tokenizer\.json is .*: expected the JSON of a tokenizer") as caught:
        tokenizer_files(data, TrainedWith(sha256(data), 0), 16)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("eos_id", [1, 2**40, -1])
def test_a_tokenizer_without_the_token_that_ends_a_text_is_refused(eos_id: int) -> None:
    with pytest.raises(PhalanxError, match=r"^tokenizer\.json is "):
        tokenizer_files(EMPTY, TrainedWith(sha256(EMPTY), eos_id), 16)


def test_a_tokenizer_that_opens_names_its_token() -> None:
    files, ids = tokenizer_files(EMPTY, TrainedWith(sha256(EMPTY), 0), 16)
    assert ids == {"eos_token_id": 0} and b'"eos_token": "a"' in files["special_tokens_map.json"]
