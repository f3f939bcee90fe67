"""Damage is found and named before it reaches a tensor: in data, in a part, in a manifest; and nothing stored can run
code.
"""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
import torch
from saved_job import emptied, file_store, open_attempt, rows_of, same_bits, save, some_tensors, whole_of

from phalanx.core.box import Box
from phalanx.core.digest import canonical_json
from phalanx.lineage import DamagedObject, Lineage, ObjectRef
from phalanx.objects import StoreError
from phalanx.objects.faults import FaultyStore, delay, fail_before, on
from phalanx.snapshot import DamagedCheckpoint, load
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, parse_part, part_bytes
from phalanx.snapshot.restore import restore
from phalanx.snapshot.verify import checkpoint_bytes, verify

GOLDEN = Path(__file__).parent / "golden_part.json"


def flip(path: Path, at: int) -> None:
    """Flips one bit of the byte `at`, in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(12))
def test_restore_after_a_flipped_bit_of_tensor_data_names_object_tensor_and_chunk(tmp_path: Path, seed: int) -> None:
    """Case 7."""
    store = file_store(tmp_path)
    tensors = some_tensors()
    manifest = save(store, open_attempt(store), 5, rows_of(tensors, 2))
    part = parse_part(manifest.parts[1].key, store.read(manifest.parts[1].key))
    chance = random.Random(seed)
    box = chance.choice([box for box in part.boxes if box.num_bytes])
    at = chance.randrange(box.num_bytes)
    start = next(item.data_start for item in part.objects if item.key == box.key)
    flip(tmp_path / box.key, start + box.start + at)
    restored = emptied(tensors)
    with pytest.raises(DamagedCheckpoint) as caught:
        restore(store, manifest, whole_of(restored))
    error = caught.value
    assert (error.key, error.tensor, error.chunk) == (box.key, box.tensor, at // CHUNK_BYTES)
    assert box.key in str(error) and box.tensor in str(error) and error.checkpoint == manifest.ref
    before = emptied(tensors)[box.tensor]
    touched = restored[box.tensor][box.box.offset[0] :] if box.box.shape else restored[box.tensor]
    assert same_bits(touched, before[box.box.offset[0] :] if box.box.shape else before)
    (damage,) = verify(store, manifest)
    assert damage.key == box.key and damage.tensors == (box.tensor,)
    (chunks,) = damage.chunks
    assert (chunks.tensor, chunks.offset, len(chunks.chunks)) == (box.tensor, box.box.offset, 1)


def test_restore_of_other_tensors_than_the_damaged_ones_succeeds(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    tensors = {"a": torch.randn(300_000), "b": torch.randn(300_000)}
    manifest = save(store, open_attempt(store), 5, [whole_of(tensors)])
    flip(tmp_path / "a00000001/s00000005/objects/00000000-00000000.safetensors", -5)
    restored = {"a": torch.zeros(300_000)}
    restore(store, manifest, whole_of(restored))
    assert same_bits(restored["a"], tensors["a"])


@pytest.mark.parametrize("nth", [1, 2])
def test_verify_of_an_object_that_vanishes_between_readings_is_damage(tmp_path: Path, nth: int) -> None:
    """Read whole once and found damaged, it is read again by chunks to name the tensors: gone then, or after that
    fails.
    """
    key = "a00000001/s00000005/objects/00000000-00000000.safetensors"
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 5, [whole_of({"a": torch.randn(9)})])
    flip(tmp_path / key, -1)
    vanish = delay(on("read" if nth == 1 else "info", key, nth=1), lambda: store.delete(key))
    faults = [vanish, fail_before(on("read", key, nth=1), StoreError("cut"))] if nth == 2 else [vanish]
    (damage,) = verify(FaultyStore(store, faults), manifest)
    assert damage.key == key and damage.tensors == ("a",)


def test_verify_reads_objects_side_by_side_and_tells_every_byte_once(tmp_path: Path) -> None:
    """Progress is told by one thread at a time; damage is told in the order of the objects."""
    store = file_store(tmp_path)
    layout = [whole_of({f"t{rank}": torch.randn(9 + rank)}) for rank in range(3)]
    manifest = save(store, open_attempt(store), 5, layout)
    meeting, told, telling = threading.Barrier(3, timeout=60), [], threading.Lock()

    def hear(num_bytes: int) -> None:
        assert telling.acquire(blocking=False)
        told.append(num_bytes)
        telling.release()

    assert verify(FaultyStore(store, [delay(on("read", "/objects/"), meeting.wait)]), manifest, hear) == ()
    assert sum(told) == checkpoint_bytes(store, manifest)
    objects = [info.key for info in store.list("a00000001/s00000005/objects/")]
    for key in objects:
        flip(tmp_path / key, -1)
    assert [damage.key for damage in verify(store, manifest)] == objects


def test_verify_that_is_told_to_stop_reads_no_further(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    layout = [whole_of({f"t{rank}": torch.randn(9)}) for rank in range(20)]
    manifest = save(store, open_attempt(store), 5, layout)
    watched = FaultyStore(store)

    def stop(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(watched, manifest, stop)
    assert sum(call.operation == "read" and "/objects/" in call.key for call in watched.calls) <= 8


def test_verify_after_a_flipped_bit_anywhere_names_the_object(tmp_path: Path) -> None:
    """Case 7: every byte of every object of a small checkpoint, header included."""
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 5, [whole_of({"a": torch.randn(9), "b": torch.ones(3)})])
    key = "a00000001/s00000005/objects/00000000-00000000.safetensors"
    whole = (tmp_path / key).read_bytes()
    for at in range(len(whole)):
        flip(tmp_path / key, at)
        assert [damage.key for damage in verify(store, manifest)] == [key], at
        (tmp_path / key).write_bytes(whole)
    assert verify(store, manifest) == ()


@pytest.mark.parametrize("name", ["parts/00000000.json", "manifest.json"])
def test_load_after_a_flipped_bit_of_part_or_manifest_names_it(tmp_path: Path, name: str) -> None:
    """Case 7."""
    store = file_store(tmp_path)
    save(store, open_attempt(store), 5, [whole_of({"a": torch.randn(9)})])
    key = f"a00000001/s00000005/{name}"
    whole = (tmp_path / key).read_bytes()
    for at in range(0, len(whole), 3):
        flip(tmp_path / key, at)
        with pytest.raises(DamagedObject) as caught:
            load(store.url)
        assert caught.value.key == key, at
        (tmp_path / key).write_bytes(whole)
    assert set(load(store.url)) == {"a"}


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_restore_of_a_truncated_or_missing_object_names_it(tmp_path: Path, damage: str) -> None:
    store = file_store(tmp_path)
    tensors = {"a": torch.randn(90)}
    manifest = save(store, open_attempt(store), 5, [whole_of(tensors)])
    key = "a00000001/s00000005/objects/00000000-00000000.safetensors"
    path = tmp_path / key
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"gone|bytes") as caught:
        restore(store, manifest, whole_of(emptied(tensors)))
    assert caught.value.key == key
    assert [found.key for found in verify(store, manifest)] == [key]


def test_next_attempt_after_damage_uses_the_checkpoint_before(tmp_path: Path) -> None:
    """Case 7: the damaged checkpoint is avoided by name, the previous one loads."""
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    good = {"a": torch.randn(9)}
    save(store, attempt, 5, [whole_of(good)])
    manifest = save(store, attempt, 10, [whole_of({"a": torch.randn(9)})])
    flip(tmp_path / "a00000001/s00000010/objects/00000000-00000000.safetensors", -1)
    with pytest.raises(DamagedCheckpoint) as caught:
        restore(store, manifest, whole_of({"a": torch.zeros(9)}))
    assert caught.value.checkpoint is not None
    open_attempt(store, avoid=[caught.value.checkpoint])
    assert load(store.url)["a"].tolist() == good["a"].tolist()


def test_part_format_is_the_golden_file() -> None:
    """A changed byte here means a new format version."""
    prefix = "a00000002/s00000015/objects/00000001-"
    first, second = f"{prefix}00000000.safetensors", f"{prefix}00000001.safetensors"
    objects = (
        StoredObject(first, 2_097_352, "xxh3:" + "1f" * 16, 192),
        StoredObject(second, 84, "xxh3:" + "2e" * 16, 80),
    )
    chunks = ("00112233445566aa", "ffeeddccbbaa0011")
    boxes = (
        StoredBox("model.é.weight", "bfloat16", (2048, 1024), Box((1024, 0), (1000, 1024)), first, 0, 1 << 20, chunks),
        StoredBox("optim.step", "float32", (), Box((), ()), second, 0, 1 << 20, ("0123456789abcdef",)),
        StoredBox("model.none", "float32", (0, 4), Box((0, 0), (0, 4)), second, 4, 1 << 20, ()),
    )
    records = (ObjectRef("a00000002/records/s00000011-s00000015-r00000001.safetensors", 77, "xxh3:" + "3d" * 16),)
    part = Part(2, 15, 1, 4, objects, boxes, records)
    assert part_bytes(part) == GOLDEN.read_bytes()
    assert parse_part("a00000002/s00000015/parts/00000001.json", GOLDEN.read_bytes()) == part


def _mutations() -> list[tuple[str, object]]:
    return [
        ("format", "phalanx.part/2"),
        ("rank", 4),
        ("rank", 0),
        ("step", "15"),
        ("attempt", True),
        ("world_size", 1.5),
        ("chunk_bytes", 0),
        ("chunk_bytes", 4096),
        ("objects", {}),
        ("boxes", [1]),
        ("extra", 1),
        ("objects.0.key", "../../other/objects/x.safetensors"),
        ("objects.0.key", "a00000001/s00000015/objects/x.safetensors"),
        ("objects.0.key", "a00000002/s00000015/objects/../x.safetensors"),
        ("objects.0.digest", "md5:00"),
        ("objects.0.num_bytes", 10),
        ("objects.1.key", "a00000002/s00000015/objects/00000001-00000000.safetensors"),
        ("boxes.0.dtype", "complex64"),
        ("boxes.0.object", "a00000002/s00000015/objects/9.safetensors"),
        ("boxes.0.shape", [1000]),
        ("boxes.0.shape", [-1, 4]),
        ("boxes.0.shape", [1 << 40, 1 << 40]),
        ("boxes.0.num_bytes", 4),
        ("boxes.0.start", 1 << 30),
        ("boxes.0.chunks", []),
        ("boxes.0.chunks", ["00112233445566aa", "FFEEDDCCBBAA0011"]),
        ("boxes.0.tensor", ""),
        ("boxes.0.extra", 1),
        ("records.0.key", "attempts/00000001.json"),
        ("records.0.digest", "xxh3:"),
    ]


@pytest.mark.parametrize(("where", "value"), _mutations())
def test_part_with_a_wrong_field_is_refused(where: str, value: object) -> None:
    """Case 6: hostile metadata is refused as damage, whatever it says."""
    content = json.loads(GOLDEN.read_bytes())
    target = content
    *path, last = where.split(".")
    for name in path:
        target = target[int(name)] if name.isdecimal() else target[name]
    target[last] = value
    with pytest.raises(DamagedCheckpoint):
        parse_part("a00000002/s00000015/parts/00000001.json", canonical_json(content))


@pytest.mark.parametrize("data", [b"", b"\x80\x04}\x94.", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_part_that_is_no_part_is_refused(data: bytes) -> None:
    """Case 6: a pickle, an empty object, a deep nesting."""
    with pytest.raises(DamagedCheckpoint):
        parse_part("a00000002/s00000015/parts/00000001.json", data)


def test_everything_stored_is_json_or_safetensors(tmp_path: Path) -> None:
    """Case 6: no pickle among the bytes of a job."""
    from safetensors import deserialize

    store = file_store(tmp_path)
    save(store, open_attempt(store), 5, rows_of(some_tensors(), 2))
    for info in store.list():
        data = store.read(info.key)
        assert not data.startswith((b"\x80", b"PK")), info.key
        if info.key.endswith(".safetensors"):
            assert deserialize(data), info.key
        else:
            assert isinstance(json.loads(data), dict), info.key
    assert len(Lineage(store).checkpoints()) == 1
