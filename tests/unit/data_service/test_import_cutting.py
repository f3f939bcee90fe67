"""Where documents end: streams cut by an EOS id in pieces, whatever the pieces, rows and blocks are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from import_kit import EOS, imported, rows_of, settings, write_mds, write_megatron

from phalanx.data.importing import Boundaries, cutting, flat, megatron
from phalanx.data.importing.cutting import by_eos, by_rows
from phalanx.data.importing.rows import Rows, groups_of

# a stream: pieces of blocks of rows of ids, with many EOS and many empty rows
_ROW = st.lists(st.sampled_from([EOS, 1, 2, 3]), max_size=6)
_STREAM = st.lists(st.lists(st.lists(_ROW, max_size=4), max_size=3), min_size=1, max_size=5)


def _blocks(pieces: list[list[list[list[int]]]]) -> list[list[Rows]]:
    row, blocks = 0, []
    for piece in pieces:
        blocks.append([])
        for rows in piece:
            tokens = np.array([token for each in rows for token in each], np.uint16)
            blocks[-1].append(Rows("f", row, tokens, np.array([len(each) for each in rows], np.int64), 0))
            row += len(rows)
    return blocks


def _following(blocks: list[list[Rows]], number: int) -> Iterator[Rows]:
    return (rows for piece in blocks[number + 1 :] for rows in piece)


@given(_STREAM)
def test_documents_by_eos_are_those_of_the_whole_stream_however_it_is_cut_into_pieces(
    pieces: list[list[list[list[int]]]],
) -> None:
    blocks = _blocks(pieces)
    rows = [row for piece in pieces for block in piece for row in block]
    stream = [token for row in rows for token in row]
    places = [f"f#{number}@{at}" if at else f"f#{number}" for number, row in enumerate(rows) for at in range(len(row))]
    ends = [number + 1 for number, token in enumerate(stream) if token == EOS]
    bounds = [0, *ends, *([len(stream)] if stream and stream[-1] != EOS else [])]
    found = [
        each
        for number, own in enumerate(blocks)
        for each in by_eos(own, _following(blocks, number), EOS, is_first=number == 0)
    ]
    assert [token for each in found for token in each.tokens.tolist()] == stream
    assert [length for each in found for length in each.lengths.tolist()] == [b - a for a, b in pairwise(bounds)]
    assert [name for each in found for name in each.ids] == [places[start] for start in bounds[:-1]]
    is_open = [mark for each in found for mark in each.is_open.tolist()]
    assert is_open == [stream[stop - 1] != EOS for stop in bounds[1:]]


@given(st.lists(_ROW, max_size=8))
def test_documents_by_rows_are_the_rows_that_hold_something(rows: list[list[int]]) -> None:
    (block,) = _blocks([[rows]])[0]
    (found,) = by_rows([block], EOS)
    kept = [row for row in rows if row]
    assert found.tokens.tolist() == [token for row in rows for token in row]
    assert found.lengths.tolist() == [len(row) for row in kept]
    assert list(found.ids) == [f"f#{number}" for number, row in enumerate(rows) if row]
    assert found.is_open.tolist() == [row[-1] != EOS for row in kept]
    assert found.num_empty == len(rows) - len(kept)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 12))
def test_groups_of_lengths_cover_all_in_order_and_pass_the_limit_by_one_row_at_most(
    lengths: list[int], limit: int
) -> None:
    groups = list(groups_of(np.array(lengths, np.int64), limit))
    assert [number for start, stop in groups for number in range(start, stop)] == list(range(len(lengths)))
    assert all(sum(lengths[start : stop - 1]) < 2 * limit for start, stop in groups)


def test_documents_by_eos_read_ahead_only_to_the_next_eos() -> None:
    blocks = _blocks([[[[1, EOS, 2]]], [[[3]], [[EOS, 4]], [[5]]]])
    read = []

    def following() -> Iterator[Rows]:
        for rows in blocks[1]:
            read.append(rows.first_row)
            yield rows

    found = list(by_eos(blocks[0], following(), EOS, is_first=True))
    assert [each.tokens.tolist() for each in found] == [[1, EOS], [2, 3, EOS]]
    assert read == [1, 2]


def test_import_of_a_raw_file_in_many_pieces_equals_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat_tokens = np.concatenate([*rows_of(300), np.array([9, 9, 9])]).astype(np.uint16)  # ends without EOS
    flat_tokens.tofile(tmp_path / "a.bin")
    _, whole = imported(tmp_path / "a.bin", tmp_path / "one", settings(dtype="uint16"))
    monkeypatch.setattr(flat, "PIECE_BYTES", 64)
    monkeypatch.setattr(flat, "BLOCK_TOKENS", 640)
    report, cut = imported(tmp_path / "a.bin", tmp_path / "many", settings(dtype="uint16"))
    assert np.array_equal(whole.tokens, flat_tokens)
    assert np.array_equal(cut.tokens, whole.tokens)
    assert np.array_equal(cut.lengths, whole.lengths)
    assert cut.ids == whole.ids
    assert report.counts["documents_without_eos"] == 1
    assert whole.lengths[-1] == 3


def test_import_of_megatron_in_many_pieces_equals_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(200)
    write_megatron(tmp_path / "corpus", rows, bounds=[0, 0, *range(3, 198), 198, 200])
    _, whole = imported(tmp_path / "corpus", tmp_path / "one", settings())
    monkeypatch.setattr(megatron, "PIECE_BYTES", 100)
    _, cut = imported(tmp_path / "corpus", tmp_path / "many", settings())
    assert np.array_equal(cut.tokens, np.concatenate(rows))
    assert np.array_equal(cut.lengths, whole.lengths)
    assert cut.ids == whole.ids
    assert whole.lengths[0] == sum(map(len, rows[:3]))


def test_import_by_eos_crosses_the_shards_of_one_mds_dataset(tmp_path: Path) -> None:
    stream = np.concatenate(rows_of(60))
    packed = [stream[start : start + 16] for start in range(0, len(stream), 16)]
    write_mds(tmp_path / "mds", packed, 5)
    _, found = imported(tmp_path / "mds", tmp_path / "out", settings(boundaries=Boundaries.EOS))
    assert np.array_equal(found.tokens, stream)
    assert found.lengths.tolist() == [len(row) for row in rows_of(60)]
    begins = np.concatenate([[0], np.cumsum(found.lengths)[:-1]])
    shard, row, at = begins // 80, begins // 16 % 5, begins % 16
    assert found.ids == [
        f"shard.{s:05d}.mds#{r}" + (f"@{a}" if a else "") for s, r, a in zip(shard, row, at, strict=True)
    ]


def test_import_by_eos_ends_a_document_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, tokens in (("a.npy", [1, EOS, 2]), ("b.npy", [3, EOS])):
        np.save(tmp_path / "in" / name, np.array(tokens))
    report, found = imported(tmp_path / "in", tmp_path / "out", settings(boundaries=Boundaries.EOS))
    assert found.lengths.tolist() == [2, 1, 2]
    assert found.ids == ["a.npy#0", "a.npy#0@2", "b.npy#0"]
    assert report.counts["documents_without_eos"] == 1


def test_import_by_eos_of_a_stream_without_eos_is_refused_where_it_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "MAX_DOCUMENT_TOKENS", 100)
    np.save(tmp_path / "a.npy", np.full(101, 9))
    with pytest.raises(cutting.BadTokens, match=r"a\.npy#0.*an EOS id within 100 tokens; check --eos-id"):
        imported(tmp_path / "a.npy", tmp_path / "out", settings(boundaries=Boundaries.EOS))


def test_import_of_an_npy_file_as_rows_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, tokens in (("a.npy", [1, EOS, 2]), ("b.npy", [3])):
        np.save(tmp_path / "in" / name, np.array(tokens, np.uint8))
    _, found = imported(tmp_path / "in", tmp_path / "out", settings())
    assert found.lengths.tolist() == [3, 1]
    assert found.ids == ["a.npy#0", "b.npy#0"]
