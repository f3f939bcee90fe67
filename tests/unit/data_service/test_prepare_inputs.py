"""Every kind of input gives the documents that are in it, by real files of each kind, and odd ones by the rules."""

import json
import os
from collections import Counter
from contextlib import contextmanager

import pytest
from corpus_builders import RECORDS, found_in, json_lines, packed, parquet_bytes, tar_bytes, write_file

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare import rules, source_of
from phalanx.data.prepare.inputs import ChangedInput, Fields, Kind, format_of
from phalanx.data.prepare.sources import Source
from phalanx.data.prepare.tokenizer import read_tokenizer_file

EXPECTED = [(record["id"], record["text"]) for record in RECORDS]


def _columns(records):
    return {name: [record.get(name) for record in records] for name in ("text", "id")}


def _json_members(records):
    return [(f"{number:04d}.json", json.dumps(record).encode()) for number, record in enumerate(records)]


def content_of(name, records=RECORDS):
    """The records as the content of a file called `name`."""
    kind = format_of(name).kind
    if kind is Kind.PARQUET:
        return parquet_bytes(_columns(records))
    return packed(name, json_lines(records) if kind is Kind.JSON_LINES else tar_bytes(_json_members(records)))


KINDS = [
    *("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson", "a.JSONL.GZ", "a.json.gz", "a.json.zst"),
    *("a.parquet", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"),
]


@pytest.mark.parametrize("name", KINDS)
def test_input_of_each_kind_gives_its_records_by_their_ids(tmp_path, name):
    assert found_in(write_file(tmp_path, name, content_of(name))) == EXPECTED


@pytest.mark.parametrize("name", KINDS)
def test_input_records_without_ids_are_called_by_their_place(tmp_path, name):
    records = [{"text": record["text"]} for record in RECORDS]
    ids = [found for found, _ in found_in(write_file(tmp_path, name, content_of(name, records)))]
    if format_of(name).kind is Kind.TAR:
        assert ids == [f"{name}:{number:04d}" for number in range(9)]
    else:
        assert ids == [f"{name}:{number}" for number in range(1, 10)]


@pytest.mark.parametrize("name", KINDS)
def test_input_fields_may_be_named_and_nested(tmp_path, name):
    records = [{"id": "no", "text": "no", "body": {"raw": {"text": r["text"]}}, "meta.id": r["id"]} for r in RECORDS]
    if name.endswith(".parquet"):
        columns = {key: [record[key] for record in records] for key in records[0]}
        data = parquet_bytes(columns)
    else:
        data = content_of(name, records)
    file = write_file(tmp_path, name, data)
    assert found_in(file, fields=Fields("body.raw.text", "meta.id")) == EXPECTED


ODD = [
    *({"text": None, "id": "null"}, {"id": "none"}, {"text": "", "id": "empty"}, {"text": " \r\n", "id": "white"}),
    *({"text": "\ufeffmark", "id": "bom"}, {"text": "a\r\nb\0", "id": "crlf_nul"}, {"text": "kept", "id": None}),
    *({"text": "kept too"}, {"text": "seven", "id": "7"}),
]


@pytest.mark.parametrize("name", KINDS)
def test_input_odd_records_follow_the_same_rules_in_every_kind(tmp_path, name):
    """Case 17."""
    counts, kept = Counter(), []
    source = source_of(write_file(tmp_path, name, content_of(name, ODD)), Fields(id="id"))
    for document in source.documents():
        text = rules.clean(document, counts)
        if text is not None:
            kept.append(text.decode())
    assert kept == ["mark", "a\nb", "kept", "kept too", "seven"]

    mended = {rules.BYTE_ORDER_MARK: 1, rules.CRLF: 2, rules.NUL: 1, rules.NO_ID: 2}
    assert dict(+counts) == mended | {rules.NO_TEXT: 2, rules.EMPTY: 2}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"{broken", rules.BROKEN),
        (b"[1]", rules.NO_TEXT),
        (b'"text"', rules.NO_TEXT),
        (b'{"text": ["a"]}', rules.NO_TEXT),
        (b'{"text": 7}', rules.NO_TEXT),
        (b'{"text": "caf\xe9"}', rules.INVALID_UTF8),
        (b'{"text": "lone \\ud800"}', rules.INVALID_UTF8),
        (b"[" * 100_000, rules.BROKEN),
        (b'{"text": "a"} {"text": "b"}', rules.BROKEN),
        (b'\xff\xfe{\x00"\x00', rules.INVALID_UTF8),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.tar"])
def test_input_record_that_is_broken_is_dropped_alone_and_counted_by_its_kind(tmp_path, name, line, count):
    before, behind = b'{"text": "before"}', b'{"text": "behind"}'
    if name == "a.tar":
        data = tar_bytes([("0.json", before), ("1.json", line), ("2.json", behind)])
    else:
        data = b"\n".join([before, line, behind])
    counts = Counter()
    source = source_of(write_file(tmp_path, name, data))
    kept = [text for text in (rules.clean(each, counts) for each in source.documents()) if text]
    assert kept == [b"before", b"behind"] and dict(+counts) == {count: 1}


def test_input_json_lines_marks_crlf_and_blank_lines_are_passed_over(tmp_path):
    data = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "two\xe2\x80\xa8three"}'
    assert found_in(write_file(tmp_path, "a.jsonl", data)) == [("a.jsonl:1", "one"), ("a.jsonl:4", "two\u2028three")]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.json"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_input_text_file_is_one_document_packed_or_not(tmp_path, name, suffix):
    content = '{"text": "é"}\n'
    file = write_file(tmp_path, name + suffix, packed(suffix, content.encode()))
    is_lines = name == "a.json" and suffix
    assert found_in(file) == [(f"{file.name}:1", "é") if is_lines else (file.name, content)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_input_zero_byte_file_is_counted(tmp_path, name):
    """Case 17."""
    counts = Counter()
    (document,) = source_of(write_file(tmp_path, name, b"")).documents()
    assert rules.clean(document, counts) is None and dict(+counts) == {rules.ZERO_BYTES: 1}


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.parquet", "a.tar", "a.tar.gz"])
def test_input_zero_byte_file_of_a_kind_that_cannot_be_empty_is_an_error(tmp_path, name):
    """Case 6: what is left of a failed download is never an empty shard."""
    source = source_of(write_file(tmp_path, name, b""))
    with pytest.raises(PhalanxError, match=rf"{name}, byte 0: expected a whole") as error:
        list(source.documents())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", KINDS)
def test_input_that_changes_after_it_was_listed_is_named(tmp_path, name):
    file = write_file(tmp_path, name, content_of(name))
    source = source_of(file)
    file.write_bytes(content_of(name) + b" ")
    with pytest.raises(ChangedInput, match=f"{name}: expected the file as it was listed, of .* bytes, but it has"):
        list(source.documents())
    file.unlink()
    with pytest.raises(ChangedInput, match="but it is gone"):
        list(source.documents())


def test_input_that_is_written_while_it_is_read_is_named(tmp_path):
    file = write_file(tmp_path, "a.jsonl", json_lines())
    documents = iter(source_of(file).documents())
    next(documents)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ChangedInput, match="it was written to while it was read"):
        list(documents)


@contextmanager
def without_root():
    """Without the rights of root, who may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_input_that_may_not_be_read_is_a_one_line_error(tmp_path):
    file = write_file(tmp_path, "a.txt", b"text")
    source = source_of(file)
    file.chmod(0)
    with without_root(), pytest.raises(PhalanxError, match="expected a file this user may read"):
        list(source.documents())


def test_input_that_the_system_fails_to_read_is_one_line():
    with pytest.raises(OutsideError, match=r"^/proc/self/mem: Input/output error$"):
        list(source_of("/proc/self/mem").documents())


@pytest.mark.parametrize("name", ["closed/a.txt", "closed/*.txt", "closed"])
def test_input_in_a_folder_that_may_not_be_looked_into_is_a_one_line_error(tmp_path, name):
    write_file(tmp_path, "closed/a.txt", b"text")
    (tmp_path / "closed").chmod(0)
    with without_root(), pytest.raises(PhalanxError, match=r"closed.*: expected a .* may .*; change .* permissions"):
        source_of(tmp_path / name)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_pipe_or_device_that_is_named_is_told_as_such(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PhalanxError, match="expected a file or a folder; it is a pipe, a socket or a device"):
        source_of(tmp_path / name)


def test_tokenizer_that_may_not_be_read_is_a_one_line_error(tmp_path):
    write_file(tmp_path, "closed/tokenizer.json", b"{}").chmod(0)
    path = tmp_path / "closed" / "tokenizer.json"
    with without_root(), pytest.raises(PhalanxError, match=r"--tokenizer is .*Permission denied.*permissions"):
        read_tokenizer_file(path)
    path.parent.chmod(0)
    with without_root(), pytest.raises(PhalanxError, match=r"--tokenizer is .*Permission denied.*permissions"):
        read_tokenizer_file(path)


def test_source_from_json_reads_the_same_pieces_without_its_listing(tmp_path):
    for name in (*KINDS, os.fsdecode(b"caf\xe9.txt")):
        write_file(tmp_path, name, content_of(name) if name in KINDS else b"text")
    source = source_of(tmp_path, Fields("text", "id"))
    assert Source.from_json(source.to_json()) == source
    worker = Source.from_json(source.without_listing().to_json())
    for piece in source.pieces():
        again = type(piece).from_json(piece.to_json())
        assert again == piece and list(worker.read(again)) == list(source.read(piece))
    assert sum(piece.num_bytes for piece in source.pieces()) == source.num_bytes


@pytest.mark.parametrize("name", ["", ".", "a.", "a..b"])
def test_source_field_without_a_name_is_a_one_line_error(tmp_path, name):
    write_file(tmp_path, "a.txt", b"text")
    with pytest.raises(PhalanxError, match="--text-field is"):
        source_of(tmp_path, Fields(text=name))
    with pytest.raises(PhalanxError, match="--id-field is"):
        source_of(tmp_path, Fields(id=name))
