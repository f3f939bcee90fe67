"""Parquet inputs: columns of every text type, nested ones, odd values by the rules, damage with its place."""

import random

import pyarrow as pa
import pytest
from corpus_builders import found_in, parquet_bytes, write_file

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import rules, source_of
from phalanx.data.prepare.inputs import CorruptInput, Fields


@pytest.mark.parametrize(
    "type_of",
    [
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_parquet_text_of_every_type_is_read(tmp_path, type_of, compression):
    text = pa.array(["one", None, "", "twö", "one"], pa.string())
    text = text.dictionary_encode() if pa.types.is_dictionary(type_of) else text.cast(type_of)
    data = parquet_bytes({"n": [1, 2, 3, 4, 5], "text": text}, row_group_size=2, compression=compression)
    assert found_in(write_file(tmp_path, "a.parquet", data)) == [
        *(("a.parquet:1", "one"), ("a.parquet:2", None), ("a.parquet:3", "")),
        *(("a.parquet:4", "twö"), ("a.parquet:5", "one")),
    ]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (pa.array([7, None]), ["7", "a.parquet:2"]),
        (pa.array(["x", None]), ["x", "a.parquet:2"]),
        (pa.array([b"\xff", b"y"]), ["\udcff", "y"]),
        (pa.array([1.5, 2.5]), ["a.parquet:1", "a.parquet:2"]),
        (pa.array([True, False]), ["a.parquet:1", "a.parquet:2"]),
        (pa.nulls(2), ["a.parquet:1", "a.parquet:2"]),
    ],
)
def test_parquet_ids_are_strings_and_integers_else_rows(tmp_path, ids, found):
    file = write_file(tmp_path, "a.parquet", parquet_bytes({"text": ["one", "two"], "id": ids}))
    assert [each for each, _ in found_in(file)] == found


def test_parquet_fields_lie_in_structs_or_have_dots_in_their_own_names(tmp_path):
    body = pa.array([{"text": "in"}, None, {"text": None}], pa.struct([("text", pa.string())]))
    table = pa.table({"body": body, "body.text": ["dot"] * 3, "meta": [{"key": {"id": 1}}, {"key": None}, None]})
    file = write_file(tmp_path, "a.parquet", parquet_bytes(table.drop_columns(["body.text"])))
    found = found_in(file, fields=Fields("body.text", "meta.key.id"))
    assert found == [("1", "in"), ("a.parquet:2", None), ("a.parquet:3", None)]
    file = write_file(tmp_path, "b.parquet", parquet_bytes(table.drop_columns(["body", "meta"])))
    assert [text for _, text in found_in(file, fields=Fields("body.text"))] == ["dot"] * 3


def test_parquet_bytes_that_are_no_text_follow_the_rules(tmp_path):
    """Case 17: also where the file calls them strings."""
    data = pa.array([b"caf\xe9", b"\xef\xbb\xbfa\r\n\0", b" "], pa.binary())
    strings = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    source = source_of(write_file(tmp_path, "a.parquet", parquet_bytes({"text": strings})))
    counts = dict.fromkeys([*rules.DROPPED, *rules.MENDED], 0)
    assert [rules.clean(each, counts) for each in source.documents()] == [None, b"a\n", None]
    assert {name for name, count in counts.items() if count} == {
        *(rules.INVALID_UTF8, rules.BYTE_ORDER_MARK, rules.CRLF, rules.NUL, rules.EMPTY)
    }


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"content": ["a"], "id": [1]}, r"expected a column 'text', found content, id; name .* with --text-field"),
        ({"text": [1]}, r"expected text in the column 'text', found int64; name another --text-field"),
        ({"text": [["a"]]}, r"expected text in the column 'text', found list"),
    ],
)
def test_parquet_without_text_is_a_one_line_error_that_says_what_is_there(tmp_path, columns, message):
    with pytest.raises(PhalanxError, match=message) as error:
        found_in(write_file(tmp_path, "a.parquet", parquet_bytes(columns)))
    assert "\n" not in str(error.value)


def test_parquet_without_rows_gives_no_documents(tmp_path):
    assert found_in(write_file(tmp_path, "a.parquet", parquet_bytes({"text": pa.array([], pa.string())}))) == []


def test_parquet_cut_at_any_byte_is_an_error(tmp_path):
    data = parquet_bytes({"text": [f"text {number}" * 9 for number in range(60)]}, row_group_size=20)
    for stop in {*range(0, len(data), 37), len(data) - 1, 1, 4}:
        with pytest.raises(CorruptInput, match=r"a\.parquet, .*: expected a whole parquet file") as error:
            found_in(write_file(tmp_path, "a.parquet", data[:stop]))
        assert "\n" not in str(error.value)


def test_parquet_with_any_flipped_bit_is_an_error_or_has_the_same_documents(tmp_path):
    """Case 5: pages carry checksums here; bits of what is not read (statistics) may flip.

    At some damages pyarrow itself would end a row group early without an error, or end the process.
    """
    texts = [f"text {number}" * 9 for number in range(60)]
    data = parquet_bytes({"text": texts}, row_group_size=20, write_page_checksum=True)
    chance, num_errors = random.Random(0), 0
    for _ in range(600):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            assert [text for _, text in found_in(write_file(tmp_path, "a.parquet", damaged))] == texts
        except PhalanxError as error:  # a footer may also name another column, or none of text
            num_errors += 1
            assert "a.parquet" in str(error) and "\n" not in str(error)
    assert num_errors > 200
