"""Text is found in tokens exactly: every document that says it, and no other, however a tokenizer cut it."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_kit import texts_of, tokenizer_bytes, write_dataset
from tokenizers import Tokenizer, decoders, models, normalizers

from phalanx.core.errors import PhalanxError
from phalanx.data.spelling import Finder, Vocabulary
from phalanx.data.text_search import find_text
from phalanx.objects import open_store
from phalanx.stream import DamagedShard, Documents, open_split
from phalanx.stream.token_text import TokenText

TEXTS = texts_of(3, 80)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    tokenizer = tokenizer_bytes(TEXTS)
    url = write_dataset(tmp_path_factory.mktemp("text") / "d", TEXTS, tokenizer)
    store = open_store(url)
    return store, open_split(store), TokenText(tokenizer)


def found_in(dataset, text):
    return [(match.shard * 10 + match.document, match) for match in find_text(*dataset, text)]


def occurrences(vocabulary, tokens, text):
    """Brute force: (first, last) token of every place in the bytes of each run between tokens without bytes."""
    found, data, owners = set(), b"", []
    for number, token in enumerate([*tokens, None]):
        piece = b"" if token is None else vocabulary[token]
        if piece:
            data, owners = data + piece, owners + [number] * len(piece)
            continue
        place = data.find(text)
        while place >= 0:
            found.add((owners[place], owners[place + len(text) - 1]))
            place = data.find(text, place + 1)
        data, owners = b"", []
    return sorted(found)


words = st.binary(min_size=1, max_size=5).map(lambda data: bytes(byte % 3 + 97 for byte in data))


@settings(max_examples=120, deadline=None)
@given(st.lists(words, min_size=1, max_size=20, unique=True), words, words, st.data())
def test_finder_finds_what_a_search_of_the_bytes_finds(vocabulary, text, more, data):
    vocabulary, text = [b"", *vocabulary], text + more[: data.draw(st.integers(0, 5))]
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=60))
    array = np.array(tokens, np.uint16)
    finder = Finder(Vocabulary(vocabulary).spelling(text), array[: data.draw(st.integers(0, 60))])
    assert [tuple(row) for row in finder.find(array).tolist()] == occurrences(vocabulary, tokens, text)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_text_of_any_piece_of_a_document_finds_exactly_the_documents_that_say_it(dataset, data):
    whole = TEXTS[data.draw(st.integers(0, 79))]
    start = data.draw(st.integers(0, len(whole) - 1))
    text = whole[start : start + data.draw(st.integers(1, 40))]
    found = found_in(dataset, text)
    assert [number for number, _ in found] == [number for number, each in enumerate(TEXTS) if text in each]


def test_text_match_says_where_it_begins_and_how_often(dataset):
    (number, match), *others = found_in(dataset, "no3x17 ")
    assert number == 17 and (match.token, match.count) == (0, 1) and not others
    for number, match in found_in(dataset, "the line"):
        assert match.count == TEXTS[number].count("the line") and match.token is not None


@pytest.mark.parametrize("text", ["no3x999", "THE LINE HOLDS WHEN", "<|endoftext|>", "\x00", "forward no3x"])
def test_text_that_nobody_says_is_not_found(dataset, text):
    """Also the end-of-text token itself, and what would go across two documents."""
    assert found_in(dataset, text) == []


@pytest.mark.parametrize("text", ["", "x" * (17 << 10), "\ud800"])
def test_text_that_cannot_be_looked_for_is_refused(dataset, text):
    with pytest.raises(PhalanxError, match="--text"):
        found_in(dataset, text)


def test_text_search_stops_reading_when_enough_is_found(dataset):
    search = find_text(*dataset, "no3x")
    assert next(search).document == 0
    search.close()


def test_text_in_damaged_tokens_is_an_error_and_no_false_answer(tmp_path):
    tokenizer = tokenizer_bytes(TEXTS)
    url = write_dataset(tmp_path / "d", TEXTS, tokenizer)
    path = tmp_path / "d" / "train" / "train-00000005.tar"
    path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPX")[:-3000] + bytes(3000))
    store = open_store(url)
    with pytest.raises(DamagedShard, match="train-00000005"):
        list(find_text(store, open_split(store), TokenText(tokenizer), "no3x1"))


def test_text_of_a_tokenizer_without_fixed_bytes_is_found_by_decoding(tmp_path):
    import json

    vocabulary = {"[UNK]": 0, "<|endoftext|>": 1, "the": 2, "line": 3, "##s": 4, "hold": 5}
    file = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }  # fmt: skip
    data = json.dumps(file).encode()
    assert Tokenizer.from_str(data.decode()).encode("the lines").ids == [2, 3, 4]
    url = write_dataset(tmp_path / "d", ["the lines", "lines hold", "the hold"], data)
    store = open_store(url)
    found = list(find_text(store, open_split(store), TokenText(data), "lines h"))
    assert [(match.document, match.token, match.count) for match in found] == [(1, None, 1)]


def test_finder_of_a_long_text_in_a_large_vocabulary_takes_little_memory():
    choose = random.Random(0)
    vocabulary = [b"", *{bytes(choose.choices(b"abcdefgh", k=choose.randint(1, 9))) for _ in range(20000)}]
    text = b"".join(vocabulary[choose.randrange(1, 9000)] for _ in range(1500))
    spelling = Vocabulary(vocabulary).spelling(text)
    assert spelling.over.nbytes < 64 << 20


@pytest.fixture(scope="module")
def fallback_dataset(tmp_path_factory):
    """A tokenizer as in Llama 2: words begin with a mark, unknown characters are bytes, one space goes at the start."""
    pieces = ["<unk>", "<s>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted({*"▁abcdefghijklmnopqrstuvwxyz0123456789", "▁t", "th", "▁th", "he", "▁the", "▁l", "in"})
    tokenizer = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)},
                   [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "l"), ("i", "n"), ("t", "h"), ("h", "e")],
                   byte_fallback=True, unk_token="<unk>")
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "<|endoftext|>"])
    data = tokenizer.to_str().encode()
    url = write_dataset(tmp_path_factory.mktemp("fallback") / "d", TEXTS, data)
    store = open_store(url)
    return store, open_split(store), TokenText(data)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_text_is_found_exactly_with_byte_fallback_too(fallback_dataset, data):
    text_of = fallback_dataset[2]
    assert text_of.has_fixed_bytes and not text_of.is_byte_level and text_of.strips_first_space
    whole = " " + TEXTS[data.draw(st.integers(0, 79))]
    start = data.draw(st.one_of(st.just(0), st.integers(0, len(whole) - 1)))
    text = whole[start : start + data.draw(st.integers(1, 30))]
    found = found_in(fallback_dataset, text)
    assert [number for number, _ in found] == [number for number, each in enumerate(TEXTS) if text in each]


def test_text_of_byte_fallback_is_what_was_prepared(fallback_dataset):
    store, split, text_of = fallback_dataset
    said = [document.text for document in Documents(store, split)]
    assert said == TEXTS
    assert TokenText(text_of._data.replace('"start":1', '"start":2').encode()).has_fixed_bytes is False
