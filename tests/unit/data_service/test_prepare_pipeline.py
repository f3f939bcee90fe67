"""Text to shards: what comes out, that it never depends on kills, and what is refused."""

import dataclasses
import json
import os

import numpy as np
import pytest
from corpus_builders import SETTINGS, write_corpus
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import Local, Phase, PrepareSettings, prepare, source_of
from phalanx.data.verification import verify_split
from phalanx.data.webdataset_reading import read_with_webdataset
from phalanx.objects import open_store
from phalanx.stream import Order, ShardIndices, WindowReader, open_split


def objects(store):
    return {found.key: store.read(found.key) for found in store.list()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return source_of(write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("dataset")
    store = open_store(f"file://{folder}")
    return store, prepare(corpus, store, SETTINGS), folder


def documents_of(store, split_name):
    """{id: tokens} of a split by webdataset alone."""
    inner = store.within(split_name)
    split, found = open_split(inner), {}
    for name in split.columns.names:
        ids = iter(json.loads(inner.read(f"{name}.ids.json"))["ids"])
        for member in read_with_webdataset(inner.url, split):
            if member.shard == name:
                found |= {next(ids): tokens for tokens in np.split(member.tokens, member.bounds[:-1])}
    return found


def test_prepare_every_document_is_in_one_split_and_decodes_to_its_text(dataset, corpus):
    store, report, _ = dataset
    train, held_out = documents_of(store, "train"), documents_of(store, "held_out")
    texts = {raw.id: raw.text.decode() for raw in corpus.documents()}
    assert set(train) | set(held_out) == set(texts) and not set(train) & set(held_out)
    assert report.train.num_documents == len(train) and report.held_out.num_documents == len(held_out) > 0
    tokenizer = Tokenizer.from_str(store.read("tokenizer.json").decode())
    eos_id = tokenizer.token_to_id("<|endoftext|>")
    for document_id, tokens in (train | held_out).items():
        assert tokens[-1] == eos_id and eos_id not in tokens[:-1]
        assert tokenizer.decode(tokens[:-1].tolist()) == texts[document_id]


def test_prepare_windows_equal_plain_webdataset(dataset):
    """The proof's two sides agree: windows over an epoch are the very tokens that webdataset reads."""
    store, _, _ = dataset
    train = store.within("train")
    split = open_split(train)
    members = {(m.shard, m.member): m.tokens for m in read_with_webdataset(train.url, split)}
    assert sum(len(tokens) for tokens in members.values()) == split.num_tokens
    order = Order(split, 1, 32, 2, ShardIndices(train, split))
    positions = np.arange(split.num_tokens // 32)
    with WindowReader(train, split, order, True) as reader:
        tokens = reader.read(positions).tokens
    for position in positions:
        parts = [
            members[split.shard(s.shard).name, s.member][s.offset : s.offset + s.length]
            for s in order.segments(position)
        ]
        assert np.concatenate(parts).tolist() == tokens[position].tolist()


def test_prepare_again_gives_the_same_bytes_and_the_same_report(dataset, corpus, tmp_path):
    store, report, _ = dataset
    before = objects(store)
    assert prepare(corpus, store, SETTINGS) == report and objects(store) == before
    elsewhere = open_store(f"file://{tmp_path}")
    prepare(corpus, elsewhere, SETTINGS)
    assert objects(elsewhere) == before


def test_prepare_other_settings_into_the_same_folder_are_refused_by_name(dataset, corpus):
    before = objects(dataset[0])
    with pytest.raises(PhalanxError, match="vocab_size 300 there, 310 here"):
        prepare(corpus, dataset[0], dataclasses.replace(SETTINGS, vocab_size=310))
    assert objects(dataset[0]) == before


def test_prepare_changed_input_into_the_same_folder_is_refused(dataset, tmp_path):
    given = tmp_path / "tokenizer.json"
    given.write_bytes(dataset[0].read("tokenizer.json"))
    settings = dataclasses.replace(SETTINGS, tokenizer=given)
    folder, out = write_corpus(tmp_path / "corpus"), open_store(f"file://{tmp_path}/out")
    prepare(source_of(folder), out, settings)
    before = objects(out)
    (folder / "part0" / "v1.0_doc.txt").write_text("something else")
    with pytest.raises(PhalanxError, match="the input has changed since"):
        prepare(source_of(folder), out, settings)
    assert objects(out) == before


def test_prepare_copies_and_odd_documents_are_counted(tmp_path):
    """Case 17: the report and the manifest both say what happened to the input."""
    folder = write_corpus(tmp_path / "corpus", 20)
    (folder / "z_copy.txt").write_text((folder / "part0" / "v1.0_doc.txt").read_text())
    (folder / "z_crlf.txt").write_bytes(b"a\r\nb")
    (folder / "z_empty.txt").write_bytes(b"")
    (folder / "z_latin.txt").write_bytes(b"caf\xe9")
    store = open_store("memory://")
    report = prepare(source_of(folder), store, dataclasses.replace(SETTINGS, held_out_fraction=0))
    nonzero = {name: count for name, count in report.counts.items() if count}
    assert nonzero == {"exact_duplicates": 1, "crlf_documents": 1, "zero_byte_files": 1, "invalid_utf8": 1}
    assert report.held_out is None and report.train.num_documents == 21
    assert open_split(store.within("train")).recipe["counts"] == dict(report.counts)


def test_prepare_ids_that_are_no_unicode_are_escaped_and_counted(tmp_path):
    """Case 17, for names: a file name that is not UTF-8, and a lone surrogate in a record's id."""
    folder = write_corpus(tmp_path / "corpus", 20)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("a text of its own")
    (folder / os.fsdecode(b"lines\xff.jsonl")).write_text(
        '{"text": "one", "id": "x\\ud800y"}\n{"text": "two"}\n{"text": "three", "id": "\\ud83d\\ude00"}\n'
    )
    store = open_store(f"file://{tmp_path}/out")
    report = prepare(source_of(folder), store, dataclasses.replace(SETTINGS, held_out_fraction=0))
    assert report.counts["ids_escaped"] == 3 and open_split(store.within("train")).recipe["counts"]["ids_escaped"] == 3
    ids = {found for found in documents_of(store, "train") if not found.startswith("part")}
    assert ids == {"caf\\udce9.txt", "x\\ud800y", "lines\\udcff.jsonl:2", "\U0001f600"}
    before = objects(store)
    assert prepare(source_of(folder), store, dataclasses.replace(SETTINGS, held_out_fraction=0)) == report
    assert objects(store) == before


def test_prepare_text_that_spells_the_end_token_cannot_end_a_document(tmp_path):
    folder = write_corpus(tmp_path / "corpus", 10)
    (folder / "evil.txt").write_text("before <|endoftext|> after")
    store = open_store(f"file://{tmp_path}/out")
    prepare(source_of(folder), store, dataclasses.replace(SETTINGS, held_out_fraction=0))
    tokens = documents_of(store, "train")["evil.txt"]
    assert tokens.tolist().count(open_split(store.within("train")).eos_id) == 1


def test_prepare_cap_takes_a_prefix(corpus):
    store, seen = open_store("memory://"), []
    report = prepare(corpus, store, dataclasses.replace(SETTINGS, max_bytes=3000), seen.append)
    assert 2000 < report.bytes_read <= 3000 and {p.phase for p in seen} == set(Phase)
    assert all(p.total_bytes == 3000 for p in seen if p.phase is not Phase.SHARDS)
    assert all(p.num_bytes <= p.total_bytes for p in seen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PrepareSettings(vocab_size=100), "--vocab-size is 100: expected at least 257"),
        (PrepareSettings(vocab_size=99999999999), "--vocab-size is 99999999999: expected at most 16777216; lower it"),
        (PrepareSettings(vocab_size=300, eos_token=""), "--eos-token is ''"),
        (PrepareSettings(vocab_size=300, eos_token="\udcff"), "--eos-token is"),
        (PrepareSettings(held_out_fraction=1.0), "--held-out-fraction"),
        (PrepareSettings(max_bytes=1), "at least one document with text"),
        (PrepareSettings(vocab_size=300, max_bytes=300, held_out_fraction=0.9999999), "lower --held-out-fraction"),
    ],
)
def test_prepare_settings_that_cannot_work_are_one_line_errors_and_write_nothing(corpus, settings, message):
    store = open_store("memory://")
    with pytest.raises(PhalanxError, match=message) as error:
        prepare(corpus, store, settings)
    assert "\n" not in str(error.value) and not list(store.list())


def test_prepare_corpus_of_dropped_documents_says_why_and_writes_nothing(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    store = open_store("memory://")
    with pytest.raises(PhalanxError, match=r"dropped: 1 zero_byte_files, 1 invalid_utf8"):
        prepare(source_of(tmp_path), store, SETTINGS)
    assert not list(store.list())


def test_prepare_with_a_wrong_text_field_is_told_which_option_to_change(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "words"}\n' * 9)
    with pytest.raises(PhalanxError, match=r"9 records_without_text\); .* no text in 'text': .*with --text-field$"):
        prepare(source_of(tmp_path), open_store("memory://"), SETTINGS)


def test_prepare_given_tokenizer_without_the_end_token_is_refused(corpus, tmp_path):
    given = tmp_path / "t.json"
    given.write_text("{}")
    with pytest.raises(PhalanxError, match=r"--tokenizer: expected a tokenizer.json"):
        prepare(corpus, open_store("memory://"), dataclasses.replace(SETTINGS, tokenizer=given))
    with pytest.raises(PhalanxError, match="no such file"):
        prepare(corpus, open_store("memory://"), dataclasses.replace(SETTINGS, tokenizer=tmp_path / "none"))


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_given_tokenizer_that_cannot_encode_the_text_is_named(tmp_path, workers):
    for name in "ab":
        lines = [f'{{"text": "words that it has not {name} {n}"}}\n' for n in range(40_000)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    given = tmp_path / "t.json"
    tokenizer = Tokenizer(WordLevel({SETTINGS.eos_token: 0, "words": 1}))
    tokenizer.add_special_tokens([SETTINGS.eos_token])
    tokenizer.save(str(given))
    store, chosen = open_store(f"file://{tmp_path}/out"), dataclasses.replace(SETTINGS, tokenizer=given)
    source = source_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert len(source.pieces()) > 1
    with pytest.raises(PhalanxError, match=r"out/tokenizer.json: expected a tokenizer that can encode") as error:
        prepare(source, store, chosen, engine=Local(workers))
    assert "\n" not in str(error.value) and "--tokenizer" in str(error.value)


@pytest.mark.parametrize(
    ("given", "out"),
    [(["in"], "in"), (["in"], "in/a/out"), (["other", "in"], "in/out"), (["in/*"], "in/out"), (["in"], "link/out")],
)
def test_prepare_into_its_own_input_is_refused(tmp_path, given, out):
    for name in ("in", "other"):
        write_corpus(tmp_path / name, 3)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PhalanxError, match=r"--out is .*expected a folder outside of the input"):
        prepare(source_of([tmp_path / each for each in given]), open_store(f"file://{tmp_path / out}"), SETTINGS)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "out"), [(["in/a", "in/b"], "in/out"), (["in/**/*.txt"], "in/out"), (["in/a"], "in")]
)
def test_prepare_beside_its_input_is_no_mistake(tmp_path, given, out):
    for name in ("a", "b"):
        write_corpus(tmp_path / "in" / name, 3)
    chosen = dataclasses.replace(SETTINGS, held_out_fraction=0.0)
    assert prepare(source_of([tmp_path / each for each in given]), open_store(f"file://{tmp_path / out}"), chosen)


def test_prepare_output_verifies(dataset):
    store, _, _ = dataset
    for name in ("train", "held_out"):
        inner = store.within(name)
        assert all(not check.damages for check in verify_split(inner, open_split(inner)))
