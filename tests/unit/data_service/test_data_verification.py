"""Damage is found, and named by shard, object, member and offset (case 5)."""

import dataclasses

import pytest
from corpus_builders import SETTINGS, write_corpus

from phalanx.data.prepare import prepare, source_of
from phalanx.data.verification import decode_ids, verify_split
from phalanx.objects import open_store
from phalanx.stream import ShardIndices, open_split


@pytest.fixture
def split_folder(tmp_path):
    store = open_store(f"file://{tmp_path}/d")
    prepare(
        source_of(write_corpus(tmp_path / "corpus")),
        store,
        dataclasses.replace(SETTINGS, held_out_fraction=0, shard_tokens=1500),
    )
    return tmp_path / "d" / "train"


def damages(folder):
    store = open_store(f"file://{folder}")
    return [str(damage) for check in verify_split(store, open_split(store)) for damage in check.damages]


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


def test_verify_flipped_payload_bit_names_member_and_offset(split_folder):
    """Case 5."""
    store = open_store(f"file://{split_folder}")
    offset = int(ShardIndices(store, open_split(store))(1).member_offsets[0])
    edit(split_folder / "train-00000001.tar", lambda tar: tar[: offset + 9] + b"\xff" + tar[offset + 10 :])
    assert damages(split_folder) == [
        f"train-00000001.tar: member 0 at byte {offset}: the tokens do not have their digest"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tar: tar[:512], "it has 512 bytes instead of"),
        (lambda tar: tar[:300], "no tar header at byte 0"),
        (lambda tar: bytes(512) + tar[512:], "no tar header at byte 0"),
        (lambda tar: b"x" * 512 + tar[512:], "no tar header at byte 0"),
        (lambda tar: tar[:-1024], "instead of"),
        (lambda tar: tar[:-1] + b"x", "no tar header at byte"),
        (lambda tar: tar.replace(b"bounds", b"Bounds"), "checksum"),
    ],
)
def test_verify_damaged_tar_is_named(split_folder, change, message):
    """Case 5: cut, zeroed, overwritten; where plain readers return fewer samples without an error."""
    edit(split_folder / "train-00000000.tar", change)
    found = damages(split_folder)
    assert found and all(line.startswith("train-00000000.tar:") for line in found)
    assert any(message in line for line in found), found


@pytest.mark.parametrize("suffix", ["tar", "index.safetensors", "ids.json"])
def test_verify_missing_or_changed_object_is_named(split_folder, suffix):
    path = split_folder / f"train-00000001.{suffix}"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert len(damages(split_folder)) >= 1 and damages(split_folder)[0].startswith(path.name)
    path.unlink()
    assert damages(split_folder) == [f"{path.name}: it is missing"]


@pytest.mark.parametrize(
    "data", [b"{", b"[" * 100_000, b"[]", b"{}", b'{"ids":3}', b'{"ids":["a"]}', b'{"ids":["a",2]}']
)
def test_decode_ids_other_than_promised_is_an_error(data):
    """Also where the manifest was written for these very bytes, so that their digest is right."""
    with pytest.raises(ValueError, match="it does not hold 2 ids"):
        decode_ids(data, 2)
    assert decode_ids(b'{"ids":["a","b"]}', 2) == ["a", "b"]
