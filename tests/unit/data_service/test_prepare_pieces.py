"""Pieces: every document in exactly one of them, whatever their bounds, and a function of names and sizes alone."""

import io
import json
import random
from itertools import pairwise

import pytest
from corpus_builders import RECORDS, json_lines, packed, parquet_bytes, write_file
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.data.prepare import source_of
from phalanx.data.prepare.inputs import InputFile, Piece, Span, cut
from phalanx.data.prepare.inputs.documents import DEFAULT_FIELDS
from phalanx.data.prepare.inputs.lines import read_lines
from phalanx.data.prepare.inputs.reading import Reading

MIB = 2**20


@given(st.lists(st.sampled_from([b"", b"a", b"bc\r", b" ", b"\xff" * 5])), st.booleans(), st.data())
def test_read_lines_each_line_is_in_exactly_one_range_for_any_bounds(lines, ends_with_line_end, data):
    content = b"\n".join(lines) + (b"\n" if ends_with_line_end else b"")
    bounds = data.draw(st.lists(st.integers(0, len(content)), max_size=5).map(sorted))
    found = []
    for start, stop in pairwise([0, *bounds, len(content)]):
        stream = io.BytesIO(content)
        stream.seek(max(start - 1, 0))
        found += read_lines(stream, start, stop)
    assert found == io.BytesIO(content).readlines()


@given(st.lists(st.sampled_from(["", "x", "yy" * 9, " "]), max_size=12), st.lists(st.integers(0, 250), max_size=4))
def test_reading_counts_the_lines_so_that_ids_go_on_from_range_to_range(tmp_path_factory, texts, cuts):
    folder = tmp_path_factory.getbasetemp() / "counted"
    data = "".join(f"{json.dumps({'text': text}) if text else ''}\n" for text in texts).encode()
    size = write_file(folder, "a.jsonl", data).stat().st_size
    ids, before = [], 0
    assume(size)
    for start, stop in pairwise(sorted({0, size, *(each for each in cuts if each < size)})):
        piece = Piece((Span("a.jsonl", size, start, stop),))
        reading = Reading(str(folder), DEFAULT_FIELDS, piece)
        ids += [document.full_id(before) for document in reading]
        before += reading.num_lines
    assert ids == [f"a.jsonl:{number}" for number, text in enumerate(texts, 1) if text]
    assert before in (0, len(texts))  # 0: one piece, the whole file, whose ids are complete


names = st.sampled_from(["a.txt", "b.jsonl", "c.jsonl.gz", "d.parquet", "e.tar", "f.md.zst"])
listings = st.lists(st.builds(InputFile, names, st.integers(0, 300) | st.integers(0, 10**6)), max_size=8)


@given(listings, st.integers(20_000, 400_000))
def test_cut_pieces_hold_every_byte_of_the_listing_once_in_its_order(files, piece_bytes):
    pieces = list(cut(files, piece_bytes))
    spans = [span for piece in pieces for span in piece.spans]
    left = iter(spans)
    for file in files:
        stop = None
        while stop != file.num_bytes:
            span = next(left)
            assert (span.path, span.num_bytes, span.start) == (file.path, file.num_bytes, stop or 0)
            stop = span.stop
    assert next(left, None) is None
    for piece in pieces:
        assert len(piece.spans) == 1 or all(span.is_whole for span in piece.spans)
        assert len(piece.spans) == 1 or piece.num_bytes <= piece_bytes
        if piece.num_bytes > piece_bytes:
            assert not piece.spans[0].format.can_be_split


def test_cut_small_files_go_together_and_large_ones_are_split_where_they_can_be():
    files = [InputFile(f"{number}.txt", 1000) for number in range(20_000)]
    large = [InputFile("a.jsonl", 100 * MIB), InputFile("b.parquet", 70 * MIB), InputFile("c.tar", 100 * MIB)]
    pieces = list(cut([*files, *large]))
    assert sum(len(piece.spans) > 1 for piece in pieces) == 4
    of_large = [[piece.num_bytes // MIB for piece in pieces if piece.spans[0].path == file.path] for file in large]
    assert of_large == [[25, 25, 25, 25], [23, 23, 23], [100]]
    assert [piece.part_of for piece in pieces if piece.part_of] == ["a.jsonl"] * 4


@pytest.mark.parametrize("piece_bytes", [400, 5000, 10**6])
def test_pieces_of_any_size_give_the_same_documents(tmp_path, piece_bytes):
    records = RECORDS * 20
    columns = {"text": [record["text"] for record in records]}
    write_file(tmp_path, "a.jsonl", json_lines([{"text": record["text"]} for record in records]))
    write_file(tmp_path, "b.parquet", parquet_bytes(columns, row_group_size=7))
    write_file(tmp_path, "c.jsonl.gz", packed(".gz", json_lines(records)))
    source = source_of(tmp_path)
    expected = [(document.id, document.text) for document in source.documents()]
    found, before = [], {}
    for piece in cut(source.files, piece_bytes):
        reading = source.read(piece)
        found += [(each.full_id(before.get(piece.part_of, 0)), each.text) for each in reading]
        before[piece.part_of] = before.get(piece.part_of, 0) + reading.num_lines
    assert found == expected and len(found) == 3 * len(records)


def test_parquet_each_row_group_is_in_exactly_one_range(tmp_path):
    """Cut at any bytes, row groups included whose first byte is a bound."""
    data = parquet_bytes({"text": [f"row {number}" for number in range(100)]}, row_group_size=3)
    write_file(tmp_path, "a.parquet", data)
    chance = random.Random(0)
    for _ in range(20):
        bounds = sorted({0, len(data), *chance.sample(range(len(data)), 6)})
        ids = []
        for start, stop in pairwise(bounds):
            piece = Piece((Span("a.parquet", len(data), start, stop),))
            ids += [each.id for each in Reading(str(tmp_path), DEFAULT_FIELDS, piece)]
        assert ids == [f"a.parquet:{row}" for row in range(1, 101)]
