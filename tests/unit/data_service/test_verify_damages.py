"""Every byte of a shard is accounted for: each damage is named with shard, object, member and offset (case 5)."""

import dataclasses
import io
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.digest import xxh3
from phalanx.data.verification import verify_split
from phalanx.objects import ObjectInfo, ObjectMissing, open_store
from phalanx.objects.base import ScopedStore
from phalanx.stream.layout import parts_of
from phalanx.stream.manifest import ShardEntry, encode_manifest, ids_key, index_key, open_split, tar_key
from phalanx.stream.shards import ShardBuilder, decode_index

DTYPE = np.dtype("<u2")


def write_split(folder: Path, num_shards: int = 2, edit=lambda name, tar, index: (tar, index)) -> None:
    """A split of small members; edit: changes a shard's tar and index before the manifest takes their digests."""
    folder.mkdir(parents=True)
    entries = []
    for number in range(num_shards):
        builder = ShardBuilder(f"train-{number:08d}", DTYPE, member_bytes=600)
        for document in range(12):
            builder.add(f"d{document}", np.arange(1, 100 + document) % 250)
        built = builder.finish()
        tar, index = edit(built.name, built.tar, built.index.encode())
        ids = b'{"ids":[' + b",".join(b'"%s"' % each.encode() for each in built.document_ids) + b"]}"
        for key, data in ((tar_key(built.name), tar), (index_key(built.name), index), (ids_key(built.name), ids)):
            (folder / key).write_bytes(data)
        entries.append(ShardEntry(built.name, len(tar), 12, built.num_tokens, xxh3(tar), xxh3(index), xxh3(ids)))
    manifest = encode_manifest(
        entries,
        name="train",
        is_held_out=False,
        tokenizer_digest="sha256:" + "0" * 64,
        vocab_size=300,
        eos_id=0,
        recipe={},
    )
    (folder / "manifest.json").write_bytes(manifest)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "train"
    write_split(folder)
    return folder


def checks_of(folder, store=None, **options):
    store = store or open_store(f"file://{folder}")
    return list(verify_split(store, open_split(store), **options))


class ChangedStore(ScopedStore):
    """The split with other bytes in some of its objects; None: they are missing."""

    def __init__(self, folder, changed):
        super().__init__(open_store(f"file://{folder.parent}"), folder.name)
        self._changed = changed

    def read(self, key, offset=0, length=None):
        if key not in self._changed:
            return super().read(key, offset, length)
        return self._bytes(key)[offset : None if length is None else offset + length]

    def info(self, key):
        return ObjectInfo(key, len(self._bytes(key))) if key in self._changed else super().info(key)

    def _bytes(self, key):
        if self._changed[key] is None:
            raise ObjectMissing(key)
        return self._changed[key]


def damages_with(whole, key, data):
    """What is found where one object of the split holds other bytes."""
    return [
        damage for check in checks_of(None, ChangedStore(whole, {key: data}), threads=1) for damage in check.damages
    ]


def parts(whole, name):
    return list(parts_of(name, decode_index((whole / index_key(name)).read_bytes()), DTYPE))


def test_verify_whole_split_has_no_damage_and_tells_its_bytes(whole):
    seen = []
    checks = checks_of(whole, observe=seen.append)
    tars = sum(path.stat().st_size for path in whole.glob("*.tar"))
    assert [check.damages for check in checks] == [(), ()] and sum(seen) == tars
    assert sum(check.num_bytes for check in checks) == sum(
        path.stat().st_size for path in whole.iterdir() if not path.name.startswith("manifest")
    )


def test_layout_of_a_shard_is_its_tar(whole):
    """The parts follow each other without a gap, and those written out are the bytes of the tar."""
    tar = (whole / "train-00000000.tar").read_bytes()
    found = parts(whole, "train-00000000")
    assert found[0].start == 0 and found[-1].stop == len(tar)
    assert all(one.stop == other.start for one, other in pairwise(found))
    assert all(part.expected in (None, tar[part.start : part.stop]) for part in found)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_verify_any_flipped_bit_names_the_part_that_holds_it(whole, data):
    name = "train-00000001"
    tar = bytearray((whole / tar_key(name)).read_bytes())
    place, bit = data.draw(st.integers(0, len(tar) - 1)), data.draw(st.integers(0, 7))
    tar[place] ^= 1 << bit
    (damage,) = damages_with(whole, tar_key(name), bytes(tar))
    (part,) = [part for part in parts(whole, name) if part.start <= place < part.stop]
    assert (damage.shard, damage.key) == (name, tar_key(name))
    assert (damage.member, damage.offset) == (part.member, part.start)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_verify_a_tar_cut_anywhere_names_size_and_place(whole, data):
    """Also at a member's border, where a plain reader ends without an error and gives fewer samples."""
    name = "train-00000001"
    tar = (whole / tar_key(name)).read_bytes()
    borders = [part.start for part in parts(whole, name)]
    cut = data.draw(st.one_of(st.sampled_from(borders), st.integers(0, len(tar) - 1)))
    size, place = damages_with(whole, tar_key(name), tar[:cut])
    assert size.what == f"it has {cut} bytes instead of {len(tar)}" and size.offset == cut
    (part,) = [part for part in parts(whole, name) if part.start <= cut < part.stop]
    assert (place.member, place.offset) == (part.member, part.start) and f"cut at byte {cut}" in place.what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tar: tar[:512] + bytes(512) + tar[1024:], "npy header"),
        (lambda tar: bytes(512) + tar[512:], "no tar header at byte 0"),
        (lambda tar: b"\xff" * 512 + tar[512:], "no tar header at byte 0"),
        (lambda tar: tar + b"x", "bytes instead of"),
        (lambda tar: tar[: len(tar) // 2], "cut at byte"),
        (lambda tar: b"", "it has 0 bytes instead of"),
    ],
)
def test_verify_eight_damages_each_named(whole, change, what):
    name = "train-00000000"
    found = damages_with(whole, tar_key(name), change((whole / tar_key(name)).read_bytes()))
    assert found and {damage.key for damage in found} == {tar_key(name)}
    assert any(what in damage.what for damage in found) and all(damage.offset is not None for damage in found)


@pytest.mark.parametrize("key", ["train-00000001.index.safetensors", "train-00000001.ids.json", "train-00000001.tar"])
def test_verify_missing_object_is_named(whole, key):
    found = damages_with(whole, key, None)
    assert [str(each) for each in found] == [f"{key}: it is missing"] and found[0].shard == "train-00000001"


def test_verify_index_and_tar_damaged_tells_both(whole):
    name = "train-00000000"
    tar, index = ((whole / key(name)).read_bytes() for key in (tar_key, index_key))
    store = ChangedStore(whole, {index_key(name): index[:-1], tar_key(name): bytes(512) + tar[512:]})
    found = [str(damage) for check in checks_of(None, store) for damage in check.damages]
    assert len(found) == 2 and found[0].startswith(f"{index_key(name)}: its digest is not")
    assert found[1] == f"{tar_key(name)}: no tar header at byte 0: end of file header"


def _files(tar):
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return [member.offset for member in opened.getmembers()]


def _twice_the_first_member(name, tar, index):
    third = _files(tar)[2]
    return tar[:third] + tar, index


def _swapped_files(name, tar, index):
    first, second, third = _files(tar)[1:4]
    return tar[:first] + tar[second:third] + tar[first:second] + tar[third:], index


@pytest.mark.parametrize(
    ("edit", "what"), [(_twice_the_first_member, "occurs twice, at bytes"), (_swapped_files, "expected its bounds")]
)
def test_verify_tar_with_the_right_digest_but_a_broken_format_names_both_offsets(tmp_path, edit, what):
    """Case 8: a manifest was written for duplicate names, or for a sample whose files are not adjacent."""
    write_split(tmp_path / "train", edit=edit)
    found = [str(damage) for check in checks_of(tmp_path / "train") for damage in check.damages]
    assert any("tar and index disagree" in line for line in found) and any(what in line for line in found), found


class FlickeringStore(ScopedStore):
    """Gives a wrong byte the first time that a tar is read."""

    def __init__(self, store, key):
        super().__init__(store, "train")
        self._key, self._left = key, 1

    def read(self, key, offset=0, length=None):
        data = super().read(key, offset, length)
        if key == self._key and self._left:
            self._left = 0
            return bytes([data[0] ^ 1]) + data[1:]
        return data


def test_verify_bytes_wrong_only_once_are_no_damage(whole):
    store = FlickeringStore(open_store(f"file://{whole.parent}"), "train-00000001.tar")
    assert [check.damages for check in checks_of(None, store)] == [(), ()]


def test_verify_many_shards_in_few_threads_keeps_their_order(tmp_path):
    write_split(tmp_path / "train", num_shards=40)
    names = [check.shard for check in checks_of(tmp_path / "train", threads=3)]
    assert names == [f"train-{number:08d}" for number in range(40)]


def test_verify_damage_is_a_plain_value(whole):
    (damage,) = damages_with(whole, "train-00000000.ids.json", b"{}")
    assert set(dataclasses.asdict(damage)) == {"shard", "key", "what", "member", "offset"}
