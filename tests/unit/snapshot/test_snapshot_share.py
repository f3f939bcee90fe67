"""What every writer of a checkpoint goes through: objects hashed as they are written, compared where they are there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from saved_job import file_store, random_tensor

from phalanx.core.box import whole
from phalanx.core.errors import OutsideError
from phalanx.objects.faults import FaultyStore, delay, on
from phalanx.snapshot.grouping import OwnedBox, plan_objects
from phalanx.snapshot.parts import CHUNK_BYTES, Part
from phalanx.snapshot.share import Deadline, OtherContent, Share

SIZES = {"a": 3, "b": 0, "c": CHUNK_BYTES, "d": 2 * CHUNK_BYTES + 5, "e": 1}
BOXES = [OwnedBox(name, "uint8", (size,), whole((size,)), n) for n, (name, size) in enumerate(SIZES.items())]
(PLANNED,) = plan_objects(BOXES)
DATA = random_tensor((PLANNED.data_bytes,), torch.uint8, 1).numpy().data
STORED = PLANNED.header + bytes(DATA)
HEAD = Part(1, 5, 0, 1, (), ())
KEY = "a00000001/s00000005/objects/00000000-00000000.safetensors"


def pieces(seed: int = 0) -> Iterator[memoryview]:
    """All data, cut at random places."""
    cuts = sorted(random.Random(seed).choices(range(len(DATA)), k=9))
    return (DATA[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(DATA)]))


@pytest.mark.parametrize("seed", range(10))
def test_object_from_pieces_cut_anywhere_has_the_digests_of_its_bytes(tmp_path: Path, seed: int) -> None:
    """Case 2: as one from memory, for boxes of no, one and several chunks."""
    stores = [file_store(tmp_path / name) for name in ("pieces", "memory")]
    streamed = Share(stores[0], HEAD).from_pieces(0, PLANNED, pieces(seed))
    assert Share(stores[1], HEAD).from_memory(0, PLANNED, memoryview(STORED)) == streamed
    assert [store.read(KEY) for store in stores] == [STORED] * 2
    assert streamed.stored.digest == f"xxh3:{xxhash.xxh3_128_hexdigest(STORED)}"
    for (box, start), stored in zip(PLANNED.boxes, streamed.boxes, strict=True):
        own = DATA[start : start + box.num_bytes]
        chunks = [own[at : at + CHUNK_BYTES] for at in range(0, len(own), CHUNK_BYTES)]
        assert (stored.tensor, stored.start) == (box.tensor, start)
        assert stored.chunks == tuple(map(xxhash.xxh3_64_hexdigest, chunks))


def test_object_that_is_there_is_compared_and_not_written_again(tmp_path: Path) -> None:
    """Case 10."""
    store = FaultyStore(file_store(tmp_path))
    share = Share(store, HEAD)
    first = share.from_pieces(0, PLANNED, pieces())
    num_calls = len(store.calls)
    assert share.from_pieces(0, PLANNED, pieces(1)) == share.from_memory(0, PLANNED, memoryview(STORED)) == first
    assert [call.operation for call in store.calls[num_calls:]].count("commit") == 0
    other = bytearray(STORED)
    other[-1] ^= 1
    for again in (
        lambda: share.from_memory(0, PLANNED, memoryview(other)),
        lambda: share.from_pieces(0, PLANNED, [memoryview(other)[len(PLANNED.header) :]]),
        lambda: share.put(KEY, b"shorter"),
    ):
        with pytest.raises(OtherContent, match="two processes") as caught:
            again()
        assert caught.value.key == KEY
    assert store.read(KEY) == STORED


def test_object_that_another_creates_meanwhile_is_ours_if_its_bytes_are(tmp_path: Path) -> None:
    """Case 10."""
    plain = file_store(tmp_path)
    raced = FaultyStore(plain, [delay(on("commit"), lambda: plain.create(KEY, STORED))])
    written = Share(raced, HEAD).from_pieces(0, PLANNED, pieces())
    assert Share(plain, HEAD).from_pieces(0, PLANNED, pieces()) == written


def test_object_past_its_deadline_is_not_created(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    share = Share(store, HEAD, Deadline(5, -1).check)
    for create in (
        lambda: share.from_pieces(0, PLANNED, pieces()),
        lambda: share.from_memory(0, PLANNED, memoryview(STORED)),
        lambda: share.finish([]),
    ):
        with pytest.raises(OutsideError, match="saving step 5 took longer than its deadline of -1 s"):
            create()
    assert list(store.list()) == []
