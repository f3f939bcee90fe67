"""Pieces, chunks and assembling against the plain sequential way: any cut, any order of parts, any cap."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from corpus_builders import SETTINGS, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_kit import expected, flat, mixed_corpus, objects, shards, with_tokenizer

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import Part, merge, prepare, prepare_part, rules, source_of
from phalanx.data.prepare.assemble import Cuts, assemble
from phalanx.data.prepare.chunk import (
    Chunk,
    ChunkBuilder,
    chunk_key,
    chunk_of_tokens,
    content_digest,
    decode_chunk,
    find_chunks,
    read_arrays,
)
from phalanx.data.prepare.copies import Bits, CopyFinder
from phalanx.data.prepare.making import piece_name, piece_names
from phalanx.data.prepare.report import finished_report
from phalanx.data.prepare.tokenizer import TokenizerFacts
from phalanx.objects import ObjectInfo, open_store
from phalanx.stream import open_split


@contextmanager
def pieces_of(piece_bytes: int, part_bytes: int = 8 << 20) -> Iterator[None]:
    """Cuts inputs into small pieces, and pieces into small chunks."""
    with (
        mock.patch("phalanx.data.prepare.sources.piece_bytes_for", lambda files: piece_bytes),
        mock.patch("phalanx.data.prepare.making.PART_BYTES", part_bytes),
    ):
        yield


def same_as_expected(store, report, wanted):
    assert shards(store) == wanted.shards
    assert dict(report.counts) == wanted.counts
    assert (report.documents_read, report.bytes_read) == (wanted.documents_read, wanted.bytes_read)
    ids = {key: json.loads(store.read(f"{key}.ids.json"))["ids"] for key in wanted.ids}
    assert ids == wanted.ids
    assert not list(store.list("chunks/"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    return source_of(mixed_corpus(folder / "corpus")), with_tokenizer(folder)


@pytest.mark.parametrize(("piece_bytes", "part_bytes"), [(1 << 25, 1 << 25), (9000, 1 << 25), (5000, 700), (4200, 100)])
def test_prepare_any_cut_gives_the_bytes_of_the_plain_way(mixed, piece_bytes, part_bytes):
    """Copies across pieces, ids by lines across ranges of one file, several chunks of one piece."""
    source, chosen = mixed
    wanted = expected(source, chosen)
    assert wanted.counts["exact_duplicates"] == 22 and "b.jsonl:149" in flat(wanted.ids)
    with pieces_of(piece_bytes, part_bytes):
        store = open_store("memory://")
        same_as_expected(store, prepare(source, store, chosen), wanted)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_prepare_parts_in_any_order_with_any_cap_equal_the_plain_way(mixed, data):
    source, chosen = mixed
    cap = data.draw(st.none() | st.integers(600, source.num_bytes + 10))
    fraction = data.draw(st.sampled_from([0.0, 0.2, 0.5]))
    chosen = type(chosen)(chosen.vocab_size, chosen.tokenizer, chosen.eos_token, fraction, cap, 200)
    count = data.draw(st.integers(1, 5))
    with pieces_of(data.draw(st.integers(4200, 20_000)), data.draw(st.sampled_from([300, 1 << 25]))):
        store = open_store("memory://")
        for number in data.draw(st.permutations(range(1, count + 1))):
            prepare_part(source, store, chosen, Part(number, count))
        same_as_expected(store, merge(store), expected(source, chosen))


def test_merge_before_all_parts_are_done_names_the_missing_pieces(mixed):
    source, chosen = mixed
    with pieces_of(9000):
        store = open_store("memory://")
        with pytest.raises(PhalanxError, match="expected a dataset begun by"):
            merge(store)
        made = prepare_part(source, store, chosen, Part(2, 3))
        assert made.pieces_made == made.pieces_of_part < made.pieces
        before = objects(store)
        with pytest.raises(PhalanxError, match=r"missing: piece 1 \(a00.txt\), 3 ") as error:
            merge(store)
        assert objects(store) == before and "\n" not in str(error.value)
        prepare_part(source, store, chosen, Part(1, 3))
        again = prepare_part(source, store, chosen, Part(1, 3))
        assert again.pieces_made == 0 and again.documents_read == 0
        report = prepare(source, store, chosen)  # a plain start makes what is missing
        assert merge(store) == report == prepare(source, store, chosen)
        assert prepare_part(source, store, chosen, Part(3, 3)).is_finished


@pytest.mark.parametrize("key", ["recipe.json", "input.json"])
@pytest.mark.parametrize(
    "data", [b"{}", b"zz", b"[1]", b'{"format": "phalanx.recipe/1", "pieces": [[[1, 2, 3, 4]], 5]}']
)
def test_merge_with_a_damaged_claim_says_so_and_its_remedy_works(mixed, key, data):
    source, chosen = mixed
    with pieces_of(9000):
        store = open_store("memory://")
        prepare_part(source, store, chosen, Part(1, 1))
        store.delete(key)
        store.create(key, data)
        with pytest.raises(PhalanxError, match=f"{key}: .*damaged; delete it and run one part again") as error:
            merge(store)
        assert "\n" not in str(error.value)
        with pytest.raises(PhalanxError):
            prepare(source, store, chosen)
        store.delete(key)
        prepare_part(source, store, chosen, Part(1, 1))
        assert merge(store).train.num_documents


@pytest.mark.parametrize("kept", [0, 5, 100, -300, -1, None])
@pytest.mark.parametrize("cap", [None, 1 << 30])
def test_merge_with_a_cut_chunk_or_without_the_tokenizer_says_so_and_its_remedy_works(mixed, kept, cap):
    source, chosen = mixed
    chosen = replace(chosen, max_bytes=cap)
    with pieces_of(9000):
        store = open_store("memory://")
        prepare_part(source, store, chosen, Part(1, 1))
        key = "tokenizer.json" if kept is None else next(iter(store.list("chunks/"))).key
        data = store.read(key)
        store.delete(key)
        if kept is not None:
            store.create(key, data[:kept])
        remedy = "it is missing: run one part again" if kept is None else "delete it and start its part again"
        with pytest.raises(PhalanxError, match=f"{key}: .*; {remedy}") as error:
            merge(store)
        assert "\n" not in str(error.value)
        store.delete(key)
        prepare_part(source, store, chosen, Part(1, 1))
        assert store.read(key) == data and merge(store).train.num_documents


def test_parts_agree_on_a_trained_tokenizer(mixed):
    source, chosen = mixed
    chosen = type(chosen)(vocab_size=300, held_out_fraction=0.2, shard_tokens=600)
    alone, shared = open_store("memory://"), open_store("memory://")
    prepare(source, alone, chosen)
    with pieces_of(9000):
        prepare_part(source, shared, chosen, Part(2, 2))
        trained = shared.read("tokenizer.json")
        shared.delete("tokenizer.json")  # as if the other part had been faster: it trains the same
        prepare_part(source, shared, chosen, Part(1, 2))
    assert shared.read("tokenizer.json") == trained
    with pieces_of(9000):
        merge(shared)
    here, there = objects(alone), objects(shared)
    assert {key for key in here if here[key] != there[key]} == {"input.json"}


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "1/0", "a/b", "1/3/4", "-1/3", "1/99999999999"])
def test_part_that_is_none_is_a_one_line_error(text):
    with pytest.raises(PhalanxError, match=r"--part is .* I/N with I from 1 to N"):
        Part.parse(text)


def test_prepare_below_a_cap_makes_no_chunks_beyond_it(mixed):
    source, chosen = mixed
    with pieces_of(4200):
        store = open_store("memory://")
        chosen = type(chosen)(chosen.vocab_size, chosen.tokenizer, held_out_fraction=0, max_bytes=1000)
        prepare_part(source, store, chosen, Part(1, 1))
        digest = sha256(chosen.tokenizer.read_bytes())
        made = find_chunks(store, piece_names(enumerate(source.pieces()), digest)).finished
        assert sorted(made) == list(range(len(made))) and 1 < len(made) < len(source.pieces()) // 2


def test_prepare_report_says_what_was_dropped_with_examples(mixed):
    source, chosen = mixed
    store = open_store("memory://")
    report = prepare(source, store, chosen)
    assert report.examples["broken_records"] == ("b.jsonl:4",) and report.examples["invalid_utf8"] == ("d_latin.txt",)
    assert report.examples["ids_escaped"] == ("mine\\ud800",) and len(report.examples["exact_duplicates"]) == 5
    kept = json.loads(store.read("report.json"))
    assert kept["counts"] == dict(report.counts) and kept["train"]["digest"] == report.train.digest
    assert prepare(source, store, chosen) == report


def test_prepare_manifest_names_no_path_engine_or_worker(mixed):
    source, chosen = mixed
    store = open_store("memory://")
    prepare(source, store, chosen)
    recipe = open_split(store.within("train")).recipe
    told = json.dumps(recipe)
    assert str(source.root) not in told and not {"workers", "engine", "parts"} & set(recipe)
    assert {"text_field", "min_chars", "input_digest", "tokenizer_digest"} <= set(recipe)


def test_prepare_other_input_is_refused_by_the_first_file_that_differs(tmp_path):
    folder, chosen = write_corpus(tmp_path / "corpus", 20), with_tokenizer(tmp_path)
    store = open_store("memory://")
    prepare(source_of(folder), store, chosen)
    file = folder / "part0" / "v1.12_doc.txt"
    size = file.stat().st_size
    file.write_text("short")
    with pytest.raises(PhalanxError, match=rf"'part0/v1.12_doc.txt' had {size} bytes and has 5"):
        prepare(source_of(folder), store, chosen)
    file.unlink()
    with pytest.raises(PhalanxError, match=r"'part0/v1.12_doc.txt' is not there any more"):
        prepare(source_of(folder), store, chosen)
    (folder / "part0" / "new.txt").write_text("new")
    with pytest.raises(PhalanxError, match=r"'part0/new.txt' was not there"):
        prepare(source_of(folder), store, chosen)
    with pytest.raises(PhalanxError, match="tokenizer_digest None there"):
        other = open_store("memory://")
        prepare(source_of(folder), other, SETTINGS)
        prepare(source_of(folder), other, chosen)


def test_prepare_damaged_chunk_is_named(mixed):
    source, chosen = mixed
    with pieces_of(9000):
        store = open_store("memory://")
        prepare_part(source, store, chosen, Part(1, 1))
        name = piece_name(source.pieces()[1], sha256(chosen.tokenizer.read_bytes()))
        key = chunk_key(name, 0, is_last=True)
        data = bytearray(store.read(key))
        data[-20] ^= 1
        store.delete(key)
        store.create(key, bytes(data))
        with pytest.raises(PhalanxError, match=rf"{key}: expected a chunk as it was written.*delete it"):
            merge(store)
        store.delete(key)
        prepare(source, store, chosen)


def small_chunk() -> Chunk:
    builder = ChunkBuilder(np.dtype("<u2"), "f.jsonl")
    builder.record(10, ["x"], is_kept=True)
    builder.record(3, ["x", "y"], is_kept=False, record_id="f.jsonl", line=2)
    builder.record(4, is_kept=True)
    builder.add("own\u00e9", np.array([5, 6], np.uint16), content_digest(b"a"))
    builder.add("f.jsonl", np.array([7], np.uint16), content_digest(b"b"), line=3)
    return builder.finish(num_lines=3)


def test_chunk_survives_its_encoding_and_parts_of_it_are_read_alone():
    chunk, store = small_chunk(), open_store("memory://")
    data = chunk.encode()
    back = decode_chunk(data, "there")
    assert back.document_ids(40) == ["own\u00e9", "f.jsonl:43"] and back.tokens.tolist() == [5, 6, 7]
    assert back.counts() == {"x": 2, "y": 1} and back.counts(2) == {"x": 0, "y": 0}
    assert [e.full_id(back.path, 40) for e in back.examples if e.rule == "y"] == ["f.jsonl:42"]
    assert data == decode_chunk(data, "there").encode()
    store.create("c", data)
    arrays = read_arrays(store, ObjectInfo("c", len(data)), ["digests", "raw_bytes", "lines"])
    assert arrays["raw_bytes"].tolist() == [10, 3, 4] and (arrays["digests"] == chunk.digests).all()
    for damaged in (b"", data[:30], data[:-1], b"x" * 100, data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(PhalanxError, match="there: expected a chunk"):
            decode_chunk(damaged, "there")


def test_chunk_of_tokens_names_documents_by_their_tokens():
    chunk = chunk_of_tokens(np.array([1, 2, 3], np.uint16), np.array([2, 1]), ["a", "b"], 6)
    assert bytes(chunk.digests[1]) == content_digest(np.array([3], "<u4").tobytes())
    assert chunk.document_ids() == ["a", "b"] and chunk.raw_bytes.tolist() == [6, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=120),
    st.integers(1, 50),
    st.lists(st.integers(1, 20), min_size=1, max_size=30),
)
def test_copies_are_all_but_the_first_however_little_fits_in_memory(values, in_memory, steps):
    digests = np.frombuffer(b"".join(content_digest(bytes([v])) for v in values), np.uint8).reshape(-1, 16)
    with CopyFinder(in_memory) as finder:
        start = 0
        for step in steps:
            finder.add(digests[start : start + step])
            start += step
        finder.add(digests[start:])
        bits = finder.copies()
    wanted = [value in values[:number] for number, value in enumerate(values)]
    assert bits.range(0, len(values)).tolist() == wanted
    assert bits.range(len(values) // 3, len(values)).tolist() == wanted[len(values) // 3 :]


def test_bits_ranges_need_no_alignment():
    bits = Bits(21)
    bits.set(np.array([0, 7, 8, 20]))
    assert np.flatnonzero(bits.range(0, 21)).tolist() == [0, 7, 8, 20]
    assert bits.range(7, 9).tolist() == [True, True] and bits.range(20, 21).tolist() == [True]


def test_prepare_report_counts_a_document_of_over_ten_million_tokens_and_names_it():
    """Case 17."""
    longest, store = rules.LONG_DOCUMENT_TOKENS, open_store("memory://")
    lengths = np.array([3, longest + 1, longest])
    chunk = chunk_of_tokens(np.ones(lengths.sum(), np.uint16), lengths, ["short", "over", "at the bound"], 8)
    store.create(chunk_key(0, 0, is_last=True), chunk.encode())
    tokenizer = TokenizerFacts(sha256(b""), vocab_size=300, eos_id=0)
    report = assemble(store, [find_chunks(store).finished[0]], Cuts(1 << 30), tokenizer, {})
    assert report.counts[rules.LONG] == 1 and report.examples == {rules.LONG: ("over",)}
    kept = json.loads(store.read("report.json"))
    assert kept["examples"] == {rules.LONG: ["over"]} and "url" not in kept
    assert finished_report(store) == report


def test_prepare_report_gives_an_id_for_every_rule_that_was_applied(mixed, monkeypatch):
    source, chosen = mixed
    monkeypatch.setattr(rules, "LONG_DOCUMENT_TOKENS", 20)
    report = prepare(source, open_store("memory://"), chosen)
    assert report.counts[rules.LONG] > 5
    counted = {rule: min(count, 5) for rule, count in report.counts.items() if count}
    assert {rule: len(ids) for rule, ids in report.examples.items()} == counted
