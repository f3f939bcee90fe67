"""The written rules for odd text (case 17), each dropped or mended and counted."""

import json
from collections import Counter
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import RawDocument, python_stdlib_corpus, rules, source_of


@pytest.mark.parametrize(
    ("text", "kept", "counted"),
    [
        (b"", None, {rules.ZERO_BYTES: 1}),
        (" \r\n\t", None, {rules.EMPTY: 1, rules.CRLF: 1}),
        ("", None, {rules.EMPTY: 1}),
        ("\ufeff".encode(), None, {rules.EMPTY: 1, rules.BYTE_ORDER_MARK: 1}),
        (b"caf\xe9", None, {rules.INVALID_UTF8: 1}),
        ("lone \ud800", None, {rules.INVALID_UTF8: 1}),
        (None, None, {rules.NO_TEXT: 1}),
        (b"\xef\xbb\xbfhello", b"hello", {rules.BYTE_ORDER_MARK: 1}),
        (b"a\r\nb\rc\n", b"a\nb\rc\n", {rules.CRLF: 1}),
        (b"a\0b", b"ab", {rules.NUL: 1}),
        ("plain \u00e9\n", "plain \u00e9\n".encode(), {}),
    ],
)
def test_clean_odd_text_follows_its_rule(text, kept, counted):
    """Case 17."""
    counts = Counter()
    assert rules.clean(RawDocument("id", text, 1), counts) == kept
    assert dict(+counts) == counted


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ((None, None), ["éé\n", "ééé\n", "éééé\n"]),
        ((4, None), ["ééé\n", "éééé\n"]),
        ((None, 4), ["éé\n", "ééé\n"]),
        ((4, 4), ["ééé\n"]),
    ],
)
def test_clean_lengths_count_characters_of_the_mended_text_bounds_included(bounds, kept):
    """Code points, not bytes; CRLF, NULs and the byte-order mark are mended before."""
    counts = Counter()
    texts = ["\ufeffé\0é\r\n", "ééé\n", "éééé\r\n", "  \n"]
    cleaned = [rules.clean(RawDocument("id", text, 1), counts, rules.Lengths(*bounds)) for text in texts]
    assert [text.decode() for text in cleaned if text] == kept
    short, long = 4 if bounds[0] else 3, 4 if bounds[1] else 9
    assert counts[rules.TOO_SHORT] == sum(length < short for length in (3, 4, 5))
    assert counts[rules.TOO_LONG] == sum(length > long for length in (3, 4, 5)) and counts[rules.EMPTY] == 1


@pytest.mark.parametrize("bounds", [(0, None), (None, 0), (-5, 10), (11, 10)])
def test_lengths_that_no_document_can_have_are_one_line_errors(bounds):
    with pytest.raises(PhalanxError, match=r"--m(in|ax)-chars is -?\d+: expected") as error:
        rules.Lengths(*bounds).check()
    assert "\n" not in str(error.value)


def test_source_folder_is_read_in_path_order_without_hidden_and_foreign_files(tmp_path):
    for name in ("b/x.py", "a.txt", "B.txt", "c.bin", ".git/config.txt", "b/.hidden.txt", "b/v1.2_doc.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [document.id for document in source_of(tmp_path).documents()]
    assert found == ["B.txt", "a.txt", "b/v1.2_doc.json", "b/x.py"]


def test_source_json_lines_give_one_document_each(tmp_path):
    """Case 7: ids are free text, dots and slashes included."""
    lines = [
        json.dumps({"text": "one", "id": "a/v1.2_doc.json"}),
        "",
        json.dumps({"text": "two"}),
        "{broken",
        '{"t": 1}',
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    found = [(document.id, document.text) for document in source_of(tmp_path / "d.jsonl").documents()]
    assert found == [("a/v1.2_doc.json", "one"), ("d.jsonl:3", "two"), ("d.jsonl:4", None), ("d.jsonl:5", None)]


@pytest.mark.parametrize("make", [lambda path: path / "nowhere", lambda path: path])
def test_source_missing_or_empty_is_a_one_line_error(tmp_path, make):
    with pytest.raises(PhalanxError, match="check the path") as error:
        source_of(make(tmp_path))
    assert "\n" not in str(error.value)


def test_stdlib_corpus_is_capped_sorted_and_without_tests():
    corpus = python_stdlib_corpus(500_000)
    assert 400_000 < corpus.num_bytes <= 500_000
    assert list(corpus.paths) == sorted(corpus.paths) and corpus == python_stdlib_corpus(500_000)
    assert not any({"test", "tests", "site-packages"} & set(Path(path).parts) for path in corpus.paths)
