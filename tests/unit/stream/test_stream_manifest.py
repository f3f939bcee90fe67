"""The manifest: frozen form, verification, one-line errors."""

import json
from pathlib import Path

import pytest
from stream_builders import numbered_documents, write_split

from phalanx.core.digest import canonical_json
from phalanx.core.errors import PhalanxError
from phalanx.objects import open_store
from phalanx.stream import open_split, refuse_held_out

GOLDEN = Path(__file__).parent / "golden_manifest.json"


def split_store(tmp_path, **options):
    store = open_store(f"file://{tmp_path}/split")
    write_split(store, numbered_documents([[3, 4, 100], [50, 7]]), **options)
    return store


def test_manifest_bytes_are_frozen(tmp_path):
    """Golden: reading it and writing it stay as they are."""
    assert split_store(tmp_path).read("manifest.json") == GOLDEN.read_bytes()


def test_open_split_gives_what_was_written(tmp_path):
    split = open_split(split_store(tmp_path))
    assert (split.num_shards, split.num_documents, split.num_tokens) == (2, 5, 164)
    assert split.dtype == "uint32" and not split.is_held_out
    assert split.shard(1).name == "t-00000001" and split.shard_tokens.tolist() == [107, 57]


def test_open_split_missing_folder_says_what_to_do(tmp_path):
    with pytest.raises(PhalanxError, match="phalanx data prepare") as error:
        open_split(open_store(f"file://{tmp_path}/none"))
    assert "\n" not in str(error.value)


def test_open_split_dataset_root_names_its_splits(tmp_path):
    split_store(tmp_path)
    with pytest.raises(PhalanxError, match="split folders below it: split"):
        open_split(open_store(f"file://{tmp_path}"))


def test_open_split_other_digest_is_refused(tmp_path):
    store = split_store(tmp_path)
    assert open_split(store, open_split(store).digest)
    with pytest.raises(PhalanxError, match="expected dataset digest sha256:0"):
        open_split(store, "sha256:0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "phalanx.split/2"}, "format"),
        ({"num_tokens": 5}, "totals"),
        ({"token_dtype": "uint16"}, "token type"),
        ({"surprise": 1}, "surprise"),
        ({"num_documents": "many"}, "num_documents"),
    ],
)
def test_open_split_contradicting_manifest_is_one_line(tmp_path, change, message):
    data = json.loads(split_store(tmp_path).read("manifest.json")) | change
    store = open_store(f"file://{tmp_path}/changed")
    store.create("manifest.json", canonical_json(data))
    with pytest.raises(PhalanxError, match=message) as error:
        open_split(store)
    assert "\n" not in str(error.value)


def test_open_split_not_json_is_one_line(tmp_path):
    store = open_store(f"file://{tmp_path}/text")
    store.create("manifest.json", b"<html>")
    with pytest.raises(PhalanxError, match=r"phalanx.split/1"):
        open_split(store)


def test_refuse_held_out_split_set_apart_is_refused_for_training(tmp_path):
    refuse_held_out(open_split(split_store(tmp_path / "a")))
    with pytest.raises(PhalanxError, match="held out for evaluation"):
        refuse_held_out(open_split(split_store(tmp_path / "b", is_held_out=True)))
