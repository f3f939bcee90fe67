"""Manifests of many shards: a small root, a table that is mapped, and what happens when its bytes are not right."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_builders import numbered_documents, write_split

from phalanx.core.digest import canonical_json, sha256
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore
from phalanx.stream.manifest import ShardEntry, manifest_objects, open_split
from phalanx.stream.shard_table import MalformedTable, NumberedNames, decode_table, numbered_or_listed, table_of

FACTS = {
    "name": "train",
    "is_held_out": False,
    "tokenizer_digest": "sha256:0",
    "vocab_size": 300,
    "eos_id": 0,
    "recipe": {},
}
HEX = st.integers(0, (1 << 128) - 1).map(lambda number: f"xxh3:{number:032x}")
COUNTS = st.integers(1, 1 << 40)
ROWS = st.lists(st.tuples(COUNTS, COUNTS, COUNTS, HEX, HEX, HEX), min_size=1, max_size=9)


def entries(rows, names=None):
    return [ShardEntry(names[k] if names else f"t-{k:08d}", *row) for k, row in enumerate(rows)]


def rows_of(count):
    return [(10 + k, 2, 5 + k, *(f"xxh3:{3 * k + column:032x}" for column in range(3))) for k in range(count)]


def large(tmp_path, count=9, inline_shards=4):
    """A manifest with a table, in files."""
    store = open_store(f"file://{tmp_path}/large")
    for key, data in manifest_objects(entries(rows_of(count)), **FACTS, inline_shards=inline_shards):
        store.create(key, data)
    return store


@given(ROWS)
def test_table_encoded_and_decoded_gives_the_rows(rows):
    table = table_of(entries(rows))
    found = decode_table(table.encode(), table.names)
    assert [found.row(k) for k in range(len(rows))] == entries(rows) and found.encode() == table.encode()


@given(st.integers(1, 2000), st.integers(1, 9), st.data())
def test_names_by_rule_number_of_a_name_is_the_inverse(count, digits, data):
    names = NumberedNames("train-", digits, count)
    number = data.draw(st.integers(0, count - 1))
    assert names.index(names[number]) == number and names[number] in names and names[number - count] == names[number]
    for other in (f"train-{count:0{digits}d}", f"other-{0:0{digits}d}", "train-", f"train-{0:0{digits + 1}d}", 7):
        assert other not in names
    assert numbered_or_listed(list(names)) == names and list(names[:3]) == list(names)[:3]


@pytest.mark.parametrize("names", [["b", "a"], ["t-1", "t-0"], ["t-0", "t-1", "t-3"], ["t-9", "t-10"], []])
def test_names_without_a_rule_stay_a_list(names):
    assert numbered_or_listed(names) == tuple(names)


def test_manifest_many_shards_are_a_small_root_and_a_table(tmp_path):
    """Equal rows give equal facts, whether they stand in the JSON or in a table."""
    small = manifest_objects(entries(rows_of(9)), **FACTS)
    (table_key, _), (root_key, root) = manifest_objects(entries(rows_of(9)), **FACTS, inline_shards=4)
    assert [key for key, _ in small] == ["manifest.json"] and (table_key, root_key) == (
        "shards.safetensors",
        "manifest.json",
    )
    assert json.loads(root)["shards"]["names"] == {"digits": 8, "prefix": "t-"}
    split, memory = open_split(large(tmp_path)), open_store("memory://")
    memory.create("manifest.json", small[0][1])
    inline = open_split(memory)
    assert split.digest == sha256(root) != inline.digest
    assert [split.shard(k) for k in range(9)] == [inline.shard(k) for k in range(9)]
    assert (split.num_bytes, split.num_tokens, split.num_documents) == (126, 81, 18)
    assert split.number_of("t-00000003") == inline.number_of("t-00000003") == 3
    assert split.number_of("t-3") is inline.number_of("t-3") is None


def test_manifest_names_without_a_rule_stay_inline():
    names = [f"part{k % 3}-{k:05d}" for k in range(9)]
    ((key, data),) = manifest_objects(entries(rows_of(9), names), **FACTS, inline_shards=4)
    store = open_store("memory://")
    store.create(key, data)
    assert open_split(store).number_of("part2-00005") == 5


def test_open_split_table_in_files_is_mapped_not_copied(tmp_path):
    split = open_split(large(tmp_path))
    base = split.shard_tokens
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert not split.shard_tokens.flags.writeable and isinstance(base.base, memoryview)
    assert f"{tmp_path}/large/shards.safetensors" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "missing", "empty"])
@pytest.mark.parametrize("is_file", [True, False])
def test_open_split_damaged_table_names_the_object(tmp_path, damage, is_file):
    store = large(tmp_path)
    data = bytearray(store.read("shards.safetensors"))
    data[-1] ^= 1
    store.delete("shards.safetensors")
    changed = {"flipped": bytes(data), "cut": bytes(data[:-1]), "longer": bytes(data) + b"1", "empty": b""}
    if damage != "missing":
        store.create("shards.safetensors", changed[damage])
    with pytest.raises(OutsideError, match=r"/large/shards.safetensors is damaged") as error:
        open_split(store if is_file else FaultyStore(store), node_folder=tmp_path / "node")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 5}, "totals"),
        ({"shards": {"count": 8}}, "I64"),
        ({"shards": {"bytes": 0}}, "greater than 0"),
        ({"shards": {"digest": "sha256:0"}}, "shards.table.digest"),
        ({"shards": {"table": "../other"}}, "shards.table.table"),
        ({"shards": {"count": 1 << 70}}, "shards.table.count"),
        ({"shards": {"names": {"prefix": "t-", "digits": 1 << 40}}}, "shards.table.names.digits"),
        ({"shards": {"surprise": 1}}, "surprise"),
    ],
)
def test_open_split_root_that_contradicts_its_table_is_one_line(tmp_path, change, message):
    store = large(tmp_path)
    root = json.loads(store.read("manifest.json"))
    shards = root["shards"] | change.get("shards", {})
    store.delete("manifest.json")
    store.create("manifest.json", canonical_json(root | change | {"shards": shards}))
    with pytest.raises(PhalanxError, match=message) as error:
        open_split(store)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=200), st.booleans())
def test_decode_table_any_bytes_are_refused_by_name(noise, with_length):
    data = len(noise).to_bytes(8, "little") + noise if with_length else noise
    with pytest.raises(MalformedTable):
        decode_table(data, NumberedNames("t-", 8, 3))


@pytest.mark.parametrize(
    "column",
    [
        {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]},
        {"dtype": "I64", "shape": [3]},
        {"dtype": "I64", "shape": [3], "data_offsets": [0, 16]},
        {"dtype": "I64", "shape": [3], "data_offsets": [-24, 0]},
        {"dtype": "I64", "shape": [3], "data_offsets": [1 << 60, (1 << 60) + 24]},
        {"dtype": "I64", "shape": [3], "data_offsets": ["0", "24"]},
        [],
        None,
    ],
)
def test_decode_table_wrong_column_is_refused_by_name(column):
    data = table_of(entries(rows_of(3))).encode()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]) | {"tokens": column}).encode()
    with pytest.raises(MalformedTable, match="tokens"):
        decode_table(len(header).to_bytes(8, "little") + header + data[8 + length :], NumberedNames("t-", 8, 3))


@pytest.mark.parametrize(
    ("column", "value"), [("digests", "md5:0"), ("bytes", 1 << 63), ("tokens", 0), ("documents", 2.5)]
)
def test_open_split_value_of_another_form_is_one_line(tmp_path, column, value):
    store = open_store(f"file://{tmp_path}")
    write_split(store, numbered_documents([[3], [4]]))
    root = json.loads(store.read("manifest.json"))
    root["shards"][column][1] = value
    store.delete("manifest.json")
    store.create("manifest.json", canonical_json(root))
    with pytest.raises(PhalanxError, match=rf"shards\.columns\.{column}\.1") as error:
        open_split(store)
    assert "\n" not in str(error.value)
