"""`phalanx.stream.open`: a split as a sequence of documents."""

import json
from pathlib import Path

import numpy as np
import pytest
from split_kit import EOS, texts_of, tokenizer_bytes, write_dataset
from tokenizers import Tokenizer

import phalanx.stream
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.webdataset_reading import read_with_webdataset
from phalanx.objects import open_store
from phalanx.objects.base import ScopedStore
from phalanx.stream import DamagedShard, Documents, open_split
from phalanx.stream.token_text import TokenText, byte_alphabet

TEXTS = texts_of(1, 57)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_bytes(TEXTS)


@pytest.fixture
def url(tmp_path, tokenizer):
    return write_dataset(tmp_path / "d", TEXTS, tokenizer)


class CountingStore(ScopedStore):
    """Notes the keys that are read."""

    def __init__(self, url):
        above, _, name = url.rpartition("/")
        super().__init__(open_store(above), name)
        self.read_keys = []

    def read(self, key, offset=0, length=None):
        self.read_keys.append(key)
        return super().read(key, offset, length)

    def read_piece(self, key, offset, into):
        self.read_keys.append(key)
        return super().read_piece(key, offset, into)

    def local_path(self, key):
        return None


def test_open_gives_each_document_with_its_id_and_text(url):
    documents = phalanx.stream.open(url)
    assert len(documents) == 57
    assert [document.text for document in documents] == TEXTS
    assert [document.id for document in documents] == [f"doc/{number}.txt" for number in range(57)]
    assert documents[-1].text == TEXTS[-1] and [each.index for each in documents[3:9:2]] == [3, 5, 7]
    assert documents[40].tokens[-1] == documents.split.eos_id and documents[40].num_tokens == len(documents[40].tokens)
    with pytest.raises(IndexError):
        documents[57]


def test_open_by_the_path_of_a_folder_is_open_by_its_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "d" / "train", Path("d"), Path("d/../d/train")):
        assert phalanx.stream.open(path).split.url == url
    with pytest.raises(PhalanxError, match="manifest"):
        phalanx.stream.open(tmp_path / "nothing")


@pytest.mark.parametrize("given", [None, 5, b"file:///d"])
def test_open_of_neither_url_nor_path_is_refused(given):
    with pytest.raises(PhalanxError, match=r"phalanx\.stream\.open is .*the URL of a dataset or split.*or a Path"):
        phalanx.stream.open(given)


def test_document_beyond_the_last_is_told_with_how_many_there_are(url):
    documents = phalanx.stream.open(url)
    for index in (57, -58):
        with pytest.raises(IndexError, match=f"index {index} is out of range: there are 57 documents"):
            documents[index]
    with pytest.raises(IndexError, match="index 2 is out of range: there are 2 documents"):
        documents[3:5][2]
    with pytest.raises(IndexError, match="index 6 is out of range: there are 6 shards"):
        documents.at(6, 0)
    with pytest.raises(IndexError, match="index 10 is out of range: there are 10 documents in the shard"):
        documents.at(0, 10)


def test_open_by_the_url_of_the_dataset_takes_the_training_split(url):
    documents = phalanx.stream.open(url.rpartition("/")[0])
    assert documents.split.url == url and "57 documents" in repr(documents) and "doc/0.txt" in repr(documents[:2])
    with pytest.raises(PhalanxError, match="split folder"):
        phalanx.stream.open(url.rpartition("/")[0], split="held_out")


def test_open_finds_documents_by_id_also_where_ids_repeat(tmp_path, tokenizer):
    ids = [f"a{number % 7}" if number else 'odd "id" \\ ü' for number in range(57)]
    documents = phalanx.stream.open(write_dataset(tmp_path / "d", TEXTS, tokenizer, ids=ids))
    assert [each.index for each in documents.by_id("a3")] == [n for n in range(1, 57) if n % 7 == 3]
    assert [each.index for each in documents.by_id('odd "id" \\ ü')] == [0]
    assert documents.by_id("a") == () and documents.by_id("\ud800") == ()


def test_open_reads_only_what_is_asked_for(url):
    store = CountingStore(url)
    documents = Documents(store, open_split(store))
    assert store.read_keys == ["manifest.json"]
    assert documents[25].num_tokens > 0 and store.read_keys[1:] == ["train-00000002.index.safetensors"]
    assert len(documents[25].tokens) and len(documents[25].tokens) and store.read_keys[2:] == ["train-00000002.tar"]
    assert documents[25].id == "doc/25.txt" and store.read_keys[3:] == ["train-00000002.ids.json"]


def test_open_without_tokenizer_has_tokens_and_no_text(url, tmp_path):
    (tmp_path / "d" / "tokenizer.json").unlink()
    document = phalanx.stream.open(url)[3]
    assert document.text is None and len(document.tokens) == document.num_tokens


def test_open_with_another_tokenizer_is_an_error(url, tmp_path):
    (tmp_path / "d" / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(OutsideError, match=r"tokenizer\.json is damaged: its digest is not sha256:"):
        _ = phalanx.stream.open(url)[3].text


def test_open_damaged_member_is_named_and_others_are_read(url, tmp_path):
    documents = phalanx.stream.open(url)
    last = documents.at(1, 9)
    path = tmp_path / "d" / "train" / "train-00000001.tar"
    data = bytearray(path.read_bytes())
    offset = int(documents.index_of(1).member_offsets[-1])
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match=f"train-00000001 is damaged: member .* at byte {offset}"):
        _ = last.tokens
    assert documents.at(1, 0).text == TEXTS[10] and documents[0].text == TEXTS[0]


def test_open_documents_are_read_only(url):
    with pytest.raises(ValueError, match="read-only"):
        phalanx.stream.open(url)[0].tokens[0] = 1


def test_token_text_is_what_the_library_decodes(tokenizer):
    library, text = Tokenizer.from_str(tokenizer.decode()), TokenText(tokenizer)
    assert text.is_byte_level
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, library.get_vocab_size(), 30)
        assert text.decode(tokens) == library.decode(tokens.tolist(), skip_special_tokens=True)


def test_token_text_of_a_tokenizer_that_is_not_byte_level_asks_the_library():
    words = {"<unk>": 0, EOS: 1, "the": 2, "line": 3, "##s": 4}
    file = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": words},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }  # fmt: skip
    text = TokenText(json.dumps(file).encode())
    assert not text.is_byte_level and text.decode([2, 3, 4]) == "the lines"
    assert text.decode_many([np.array([2]), np.array([3, 4])]) == ["the", "lines"]


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"model": {}}'])
def test_token_text_of_no_tokenizer_is_an_error(data):
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        TokenText(data)


def test_byte_alphabet_is_that_of_the_library():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_alphabet()) == set(ByteLevel.alphabet()) and sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("folder", ["a b", "v1.2_x", "br{1..3}ace", "with::colon", "ünï", "per%20cent", "q?x", "h#x"])
def test_split_in_an_oddly_named_folder_is_read_and_by_plain_webdataset_too(tmp_path, tokenizer, folder):
    url = write_dataset(tmp_path / folder / "d", TEXTS[:9], tokenizer)
    documents = phalanx.stream.open(url)
    assert [document.text for document in documents] == TEXTS[:9]
    assert sum(len(member.bounds) for member in read_with_webdataset(url, documents.split)) == 9
