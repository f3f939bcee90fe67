"""Ranks that restore together: each chunk is read once by one who needs it, whatever the layouts, and reaches all."""

from __future__ import annotations

import math
import queue
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from saved_job import file_store, open_attempt, same_bits, save, some_tensors, tilings
from support.meshes import MeshLayout, boxes_of, held_bytes, shapes_of

from phalanx.core.box import Box, HeldTensor
from phalanx.core.errors import OutsideError
from phalanx.snapshot import DamagedCheckpoint
from phalanx.snapshot.index import Index, StoredTensor
from phalanx.snapshot.parts import StoredBox
from phalanx.snapshot.plan import coalesced
from phalanx.snapshot.restore import RestoreReport, restore
from phalanx.snapshot.sharing import SharedRun
from phalanx.snapshot.together import plan

LAYOUTS = st.builds(MeshLayout, st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 3), st.booleans())
LEFT_OUT = re.compile(r"layers\.[12]\.|exp_avg_sq")  # more of the same


class QueuePeers:
    """A group of threads."""

    def __init__(self, rank: int, size: int, wires: Mapping[tuple[int, int], queue.Queue[bytes]]) -> None:
        self.rank, self.size, self._wires = rank, size, wires

    def gather(self, data: bytes) -> list[bytes]:
        for member in range(self.size):
            self._wires[self.rank, member].put(data)
        return [self._take(member) for member in range(self.size)]

    def swap(self, outgoing: Mapping[int, np.ndarray], incoming: Mapping[int, int]) -> dict[int, np.ndarray]:
        for member, data in outgoing.items():
            self._wires[self.rank, member].put(data.tobytes())
        found = {member: np.frombuffer(self._take(member), dtype=np.uint8) for member in incoming}
        assert {member: len(data) for member, data in found.items()} == dict(incoming)
        return found

    def _take(self, member: int) -> bytes:
        try:
            return self._wires[member, self.rank].get(timeout=10)
        except queue.Empty as error:
            raise OutsideError(f"rank {member} is gone or late") from error


def as_group(size: int, work: Callable[[QueuePeers], RestoreReport]) -> list[RestoreReport | BaseException]:
    """What each of `size` ranks gave or raised."""
    wires: dict[tuple[int, int], queue.Queue[bytes]] = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    with ThreadPoolExecutor(size) as pool:
        tasks = [pool.submit(work, QueuePeers(rank, size, wires)) for rank in range(size)]
    return [task.exception() or task.result() for task in tasks]


def stored_index(shapes: Mapping[str, tuple[int, ...]], layout: MeshLayout, chunk_bytes: int) -> Index:
    """What a save in this layout would store: the boxes of each first replica, one object a rank."""
    tensors: dict[str, list[StoredBox]] = {name: [] for name in shapes}
    for rank, held in enumerate(boxes_of(shapes, layout)):
        start = 0
        for name, (box, replica, _) in held.items():
            if replica == 0 and box.num_elements:
                chunks = tuple("0" * 16 for _ in range(math.ceil(box.num_elements * 4 / chunk_bytes)))
                found = StoredBox(name, "float32", shapes[name], box, f"k{rank}", start, chunk_bytes, chunks)
                tensors[name].append(found)
                start += found.num_bytes
    return Index({name: StoredTensor(name, "float32", shapes[name], tuple(b)) for name, b in tensors.items()}, {})


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(1, 40), st.integers(1, 40), st.sampled_from([16, 64, 1024]))
@example(MeshLayout(1, 1, 1, False), MeshLayout(1, 1, 2, False), 8, 32, 16)  # a rank needs every second chunk
def test_plan_of_any_two_layouts_reads_each_chunk_once_and_gives_it_to_all_who_need_it(
    before: MeshLayout, after: MeshLayout, rows: int, columns: int, chunk_bytes: int
) -> None:
    """Case 13: and reads at most 1.05 times what the boxes hold, those held by several counted once."""
    shapes = {name: shape for name, shape in shapes_of(rows, columns).items() if not LEFT_OUT.search(name)}
    index = stored_index(shapes, before, chunk_bytes)
    ranks = boxes_of(shapes, after)
    everyone = [{name: [held[0]] for name, held in rank.items()} for rank in ranks]
    stored = [box for tensor in index.tensors.values() for box in tensor.boxes]
    plans = [plan(index, stored, everyone, rank) for rank in range(after.world_size)]
    readers: dict[tuple[str, str, int], int] = {}
    for rank, found in enumerate(plans):
        assert [item.turn for item in found] == sorted(item.turn for item in found)
        for item in found:
            assert rank in item.takers and item.reader in item.takers
            for chunk in range(item.run.first, item.run.first + item.run.count):
                assert readers.setdefault((item.run.stored.tensor, *_chunk(item, chunk)), item.reader) == item.reader
    assert len(readers) == sum(len(box.chunks) for box in stored)
    reads = [
        read
        for rank, found in enumerate(plans)
        for read in coalesced(item.run for item in found if item.reader == rank)
    ]
    assert sum(read.stop - read.start for read in reads) <= 1.05 * held_bytes(shapes, ranks, 4)


def _chunk(item: SharedRun, chunk: int) -> tuple[str, int]:
    return item.run.stored.key, item.run.stored.start + chunk * item.run.stored.chunk_bytes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.data())
def test_plan_for_random_boxes_gives_every_rank_the_chunks_of_its_boxes(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    stored = [
        StoredBox("t", "float32", shape, box, f"k{n}", 4, 12, ("0" * 16,) * -(-box.num_elements * 4 // 12))
        for n, box in enumerate(data.draw(tilings(shape)))
        if box.num_elements
    ]
    index = Index({"t": StoredTensor("t", "float32", shape, tuple(stored))}, {})
    everyone = [{"t": data.draw(tilings(shape))[:2]} for _ in range(3)]
    for rank, needs in enumerate(everyone):
        found = plan(index, stored, everyone, rank)
        covered = {(item.run.stored.key, item.run.first + at) for item in found for at in range(item.run.count)}
        needed = {
            (box.key, at)
            for box in stored
            for wanted in needs["t"]
            if (common := wanted.intersect(box.box)) is not None
            for at in _chunks_of(box, common)
        }
        assert covered == needed


def test_plan_of_boxes_that_nobody_needs_is_empty() -> None:
    stored = StoredBox("t", "float32", (1,), Box((0,), (1,)), "k", 4, 12, ("0" * 16,))
    index = Index({"t": StoredTensor("t", "float32", (1,), (stored,))}, {})
    assert plan(index, [stored], [{"t": [Box((0,), (0,))]}, {}], 0) == []


def _chunks_of(stored: StoredBox, common: Box) -> set[int]:
    marks = np.zeros(stored.box.shape, dtype=bool)
    marks[stored.box.slices_of(common)] = True
    return {byte // 12 for n in np.flatnonzero(marks.reshape(-1)) for byte in (n * 4, n * 4 + 3)}


def column_of(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> list[HeldTensor]:
    """The last dimension cut over all ranks: every chunk of the large tensor is shared."""
    held = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not shape:
            held.append(HeldTensor(name, shape, Box((), ()), tensor, rank, size))
            continue
        start, stop = shape[-1] * rank // size, shape[-1] * (rank + 1) // size
        box = Box((*(0,) * (len(shape) - 1), start), (*shape[:-1], stop - start))
        held.append(HeldTensor(name, shape, box, tensor[..., start:stop]))
    return held


def test_restore_together_by_columns_reads_each_byte_once_and_is_bit_equal(tmp_path: Path) -> None:
    """Case 13."""
    tensors = some_tensors()
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 5, [column_of(tensors, rank, 3) for rank in range(3)])
    restored = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    reports = as_group(
        2, lambda peers: restore(store, manifest, column_of(restored, peers.rank, 2), all_names=tensors, peers=peers)
    )
    assert all(isinstance(report, RestoreReport) for report in reports), reports
    assert all(same_bits(restored[name], tensors[name]) for name in tensors)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    done = [report for report in reports if isinstance(report, RestoreReport)]
    assert sum(report.read_bytes for report in done) <= 1.05 * num_bytes
    assert sum(report.received_bytes for report in done) > num_bytes / 4, "both need the columns in the middle"


def test_restore_together_of_damaged_bytes_names_them_once_and_ends_everyone(tmp_path: Path) -> None:
    """Case 7: the reader names object and tensor; the others end as it is gone, and nobody trains on what it has."""
    tensors = {"model.large": some_tensors()["model.large"]}
    store = file_store(tmp_path)
    manifest = save(store, open_attempt(store), 5, [column_of(tensors, 0, 1)])
    path = tmp_path / "a00000001/s00000005/objects/00000000-00000000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    ends = as_group(2, lambda peers: restore(store, manifest, column_of(dict(tensors), peers.rank, 2), peers=peers))
    named = [end for end in ends if isinstance(end, DamagedCheckpoint)]
    assert len(named) == 1 and named[0].tensor == "model.large" and named[0].checkpoint == manifest.ref
    assert any(isinstance(end, OutsideError) and "gone or late" in str(end) for end in ends)
