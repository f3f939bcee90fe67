"""The pure core: owners, coverage, grouping, and the plan of reads, against brute force over random boxes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from saved_job import tilings

from phalanx.core.box import Box, whole
from phalanx.snapshot.coverage import coverage_fault
from phalanx.snapshot.dtypes import DTYPES, bfloat16_to_float32, float32_to_bfloat16
from phalanx.snapshot.grouping import OwnedBox, plan_objects
from phalanx.snapshot.owners import MIN_PIECE_BYTES, owned_box
from phalanx.snapshot.parts import StoredBox
from phalanx.snapshot.plan import chunk_runs, coalesced, needed_chunks

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@settings(deadline=None)
@given(SHAPES, st.data())
def test_coverage_of_any_tiling_is_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    assert coverage_fault(shape, data.draw(tilings(shape))) is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.data())
def test_coverage_with_a_box_too_few_or_too_many_is_refused(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = [box for box in data.draw(tilings(shape)) if box.num_elements]
    chosen = data.draw(st.integers(0, len(boxes) - 1))
    assert "in no box" in (coverage_fault(shape, boxes[:chosen] + boxes[chosen + 1 :]) or "")
    assert "overlap" in (coverage_fault(shape, [*boxes, boxes[chosen]]) or "")


def test_coverage_with_one_element_twice_and_one_missing_is_refused() -> None:
    assert "overlap" in (coverage_fault((4, 4), [Box((0, 0), (2, 4)), Box((1, 0), (2, 4))]) or "")
    assert "overlap" in (coverage_fault((), [Box((), ()), Box((), ())]) or "")


def test_coverage_with_a_box_outside_is_refused() -> None:
    assert "outside" in (coverage_fault((4,), [Box((0,), (5,))]) or "")
    assert "outside" in (coverage_fault((4,), [Box((0, 0), (2, 2))]) or "")


@settings(deadline=None)
@given(
    st.sampled_from([(), (1,), (7,), (3, 5), (1, 1, 4), (2048, 1024), (1, 4096, 700), (3, 1 << 20)]), st.integers(1, 9)
)
def test_owners_of_a_box_tile_it_exactly_once(shape: tuple[int, ...], num_replicas: int) -> None:
    box = Box((3,) * len(shape), shape)
    owned = [owned_box("model.w", box, 4, replica, num_replicas) for replica in range(num_replicas)]
    local = [Box(tuple(o - 3 for o in part.offset), part.shape) for part in owned if part is not None]
    assert coverage_fault(shape, local) is None


def test_owners_of_many_boxes_write_nearly_equal_bytes() -> None:
    shapes = [(2048, 2048), (2048, 5632), (5632, 2048), (2048,), (32000, 2048)] * 20
    written = [0] * 4
    for number, shape in enumerate(shapes):
        for replica in range(4):
            part = owned_box(f"layers.{number}", whole(shape), 4, replica, 4)
            written[replica] += part.num_elements * 4 if part else 0
    assert max(written) - min(written) < 0.01 * max(written)


def test_owner_of_small_boxes_varies_with_the_name() -> None:
    owners = {
        replica
        for number in range(64)
        for replica in range(4)
        if owned_box(f"norm.{number}", whole((64,)), 4, replica, 4) is not None
    }
    assert owners == {0, 1, 2, 3} and MIN_PIECE_BYTES > 64 * 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 40)), max_size=12), st.integers(1, 300))
def test_grouping_any_boxes_gives_files_that_safetensors_reads(items: list[tuple[str, int]], object_bytes: int) -> None:
    owned = [OwnedBox(f"t{n}", dtype, (size,), whole((size,)), n) for n, (dtype, size) in enumerate(items)]
    objects = plan_objects(owned, object_bytes)
    seen: list[int] = []
    for planned in objects:
        assert planned.data_bytes <= object_bytes or len(planned.boxes) == 1
        read = dict(deserialize(planned.header + bytes(planned.data_bytes)))
        assert set(read) == {box.tensor for box, _ in planned.boxes}
        for box, start in planned.boxes:
            assert (
                read[box.tensor]["shape"] == list(box.box.shape) and read[box.tensor]["dtype"] == DTYPES[box.dtype].code
            )
            assert (planned.data_start + start) % DTYPES[box.dtype].itemsize == 0
            assert (len(planned.header) + start) % DTYPES[box.dtype].itemsize == 0
            seen.append(box.index)
    assert sorted(seen) == list(range(len(owned)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.integers(4, 40), st.data())
def test_plan_of_any_boxes_reads_exactly_the_chunks_that_hold_them(
    shape: tuple[int, ...], chunk_bytes: int, data: st.DataObject
) -> None:
    num_bytes = whole(shape).num_elements * 4
    chunks = tuple("0" * 16 for _ in range(-(-num_bytes // chunk_bytes)))
    stored = StoredBox("t", "float32", shape, whole(shape), "k", 8, chunk_bytes, chunks)
    wanted = [box for box in data.draw(tilings(shape))[:2] if box.num_elements]
    marks = np.zeros(shape, dtype=bool)
    for box in wanted:
        marks[whole(shape).slices_of(box)] = True
    brute = {at for n in np.flatnonzero(marks.reshape(-1)) for at in (n * 4 // chunk_bytes, (n * 4 + 3) // chunk_bytes)}
    needed = needed_chunks(stored, wanted)
    assert set(np.flatnonzero(needed)) == brute
    runs = chunk_runs(stored, needed, read_bytes=3 * chunk_bytes)
    assert {run.first + at for run in runs for at in range(run.count)} == brute
    assert sum(run.count for run in runs) == len(brute) and all(run.count <= 3 for run in runs)
    reads = coalesced(runs, read_bytes=5 * chunk_bytes, gap_bytes=0)
    assert sorted(id(run) for read in reads for run in read.runs) == sorted(map(id, runs))
    assert sum(read.stop - read.start for read in reads) == sum(run.stop - run.start for run in runs)
    assert all(read.start <= run.start and run.stop <= read.stop for read in reads for run in read.runs)


def test_plan_of_neighbours_in_one_object_is_one_read() -> None:
    boxes = [StoredBox(f"t{n}", "uint8", (10,), whole((10,)), "k", n * 10, 1 << 20, ("0" * 16,)) for n in range(5)]
    runs = [run for box in boxes for run in chunk_runs(box, needed_chunks(box, [box.box]))]
    assert [(read.start, read.stop, len(read.runs)) for read in coalesced(runs)] == [(0, 50, 5)]


def test_bfloat16_conversion_agrees_with_torch_for_every_bit_pattern() -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = bfloat16_to_float32(patterns)
    assert np.array_equal(wide.view(np.uint32), patterns.astype(np.uint32) << 16)
    halves = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    ties = ((patterns.astype(np.uint32) << np.uint32(16)) | np.uint32(0x8000)).view(np.float32)
    for values in (halves, ties, wide):
        theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        ours = float32_to_bfloat16(values)
        number = ~np.isnan(values)
        assert np.array_equal(ours[number], theirs[number])
        assert np.isnan(bfloat16_to_float32(ours[~number])).all()
