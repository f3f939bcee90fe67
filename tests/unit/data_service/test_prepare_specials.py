"""No text becomes a special token, whatever the tokenizer's model: what can't be guarded is refused."""

import dataclasses
import json

import pytest
from corpus_builders import SETTINGS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import prepare, source_of
from phalanx.data.prepare.settings import END_OF_TEXT
from phalanx.data.prepare.specials import can_be_learnt
from phalanx.data.prepare.tokenizer import load_tokenizer, train_tokenizer
from phalanx.objects import open_store
from phalanx.stream import open as open_documents

EVIL = "words </s> and <s>x</s> <pad> words"
SPECIAL = ["<unk>", "</s>", "<s>", "<pad>"]
WORDS = [*"</>sand xword", "words", "and", "x"]


def bytes_of(model, pre_tokenizer=None, special=SPECIAL):
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str().encode()


def unigram():
    pieces = [(piece, 0.0) for piece in SPECIAL] + [(f"\u2581{word}", -2.0) for word in WORDS]
    pieces += [(letter, -5.0) for letter in dict.fromkeys("\u2581</>sandxworp")]
    return bytes_of(models.Unigram(pieces, 0, False), pre_tokenizers.Metaspace())


def word_level():
    vocab = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    return bytes_of(models.WordLevel(vocab, "<unk>"), pre_tokenizers.WhitespaceSplit())


@pytest.mark.parametrize("make", [unigram, word_level])
def test_special_tokens_in_a_vocabulary_are_not_found_in_text(make):
    data = make()
    before = Tokenizer.from_str(data.decode())
    before.encode_special_tokens = True
    special = {before.token_to_id(token) for token in SPECIAL[1:]}
    assert special & set(before.encode(EVIL, add_special_tokens=False).ids), "the library finds them"
    tokenizer = load_tokenizer(data, "</s>")
    (tokens,) = tokenizer.encode([EVIL.encode()])
    assert tokens[-1] == tokenizer.facts.eos_id and not special & set(tokens[:-1].tolist())
    (plain,) = tokenizer.encode([b"words and x"])
    assert plain[:-1].tolist() == before.encode("words and x", add_special_tokens=False).ids


def test_end_token_that_is_added_and_not_special_is_not_found_in_text():
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate("</s>a")}, []))
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    loaded = load_tokenizer(tokenizer.to_str().encode(), "</s>")
    (tokens,) = loaded.encode([b"a</s>a"])
    assert tokens.tolist() == [4, 0, 1, 2, 3, 4, loaded.facts.eos_id]


@pytest.mark.parametrize("pieces", [["the"], ["t", "h", "th", "the"]])
def test_end_token_that_is_a_word_is_refused(pieces):
    merges = [("t", "h"), ("th", "e")] if len(pieces) > 1 else []
    model = models.BPE({piece: number for number, piece in enumerate([*pieces, "e"])}, merges)
    if not merges:
        model = models.WordLevel({"the": 0, "<unk>": 1}, "<unk>")
    data = Tokenizer(model).to_str().encode()
    with pytest.raises(
        PhalanxError, match=r"--tokenizer: expected a tokenizer in which no text becomes .* 'the'; name"
    ):
        load_tokenizer(data, "the")


def test_end_token_that_a_model_cannot_do_without_is_refused():
    data = train_tokenizer(iter([b"document a document a document"] * 9), 300, "document")
    assert "document" in json.loads(data)["model"]["vocab"]
    with pytest.raises(PhalanxError, match="expected a tokenizer in which no text becomes"):
        load_tokenizer(data, "document")
    with pytest.raises(PhalanxError, match="expected a tokenizer in which no text becomes"):
        load_tokenizer(train_tokenizer(iter([b"banana"] * 9), 300, "a"), "a")


@pytest.mark.parametrize("token", ["a", "EOS", "document", "\u0120the", "\u00e9", "'r", "12", "|||"])
def test_end_token_that_training_may_learn_is_refused_and_nothing_written(tmp_path, token):
    (tmp_path / "a.txt").write_text("document " * 99)
    store = open_store("memory://")
    with pytest.raises(PhalanxError, match=r"--eos-token is .*: expected a token that no text becomes") as raised:
        prepare(source_of(tmp_path), store, dataclasses.replace(SETTINGS, eos_token=token))
    assert "\n" not in str(raised.value) and not list(store.list())


@pytest.mark.parametrize("token", [END_OF_TEXT, "</s>", "[EOS]", "<0x00>", "<eos>", " ", "\u65e5\u672c"])
def test_end_token_of_several_words_or_other_characters_is_never_learnt(token):
    assert not can_be_learnt(token)
    text = f"{token} {token}{token} x{token}x ".encode() * 500
    trained = load_tokenizer(train_tokenizer(iter([text]), 600, token), token)
    (tokens,) = trained.encode([text])
    assert tokens.tolist().count(trained.facts.eos_id) == 1


def test_prepare_with_a_unigram_tokenizer_ends_each_document_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(EVIL)
    (tmp_path / "tokenizer.json").write_bytes(unigram())
    url = f"file://{tmp_path}/out"
    chosen = dataclasses.replace(SETTINGS, tokenizer=tmp_path / "tokenizer.json", eos_token="</s>", held_out_fraction=0)
    prepare(source_of(tmp_path / "in"), open_store(url), chosen)
    tokens = open_documents(url)[0].tokens.tolist()
    assert tokens.count(1) == 1 and tokens[-1] == 1
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == unigram()


@pytest.mark.parametrize("letter", [b"a", b" ", "\u00e9".encode()])
def test_training_on_one_long_run_takes_no_time_with_its_square(letter):
    before = train_tokenizer(iter([b"some words of text"]), 300, END_OF_TEXT)
    trained = train_tokenizer(iter([b"some words of text", letter * 4_000_000]), 300, END_OF_TEXT)
    assert len(json.loads(trained)["model"]["vocab"]) > 256 and trained != before


def test_training_on_runs_up_to_the_bound_is_training_on_the_text():
    text = "a" * 1024 + " " * 1024 + "word\n" * 400
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator([text], trainer)
    found = Tokenizer.from_str(train_tokenizer(iter([text.encode()]), 300, END_OF_TEXT).decode())
    assert found.get_vocab() == plain.get_vocab()
