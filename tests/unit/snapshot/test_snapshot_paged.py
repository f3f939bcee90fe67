"""Tensors whose values lie in a file: saved and restored a part at a time, in any layout, beside updates that go on."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_job import file_store, open_attempt, random_tensor, rows_of, same_bits, save, tilings, whole_of
from test_snapshot_together import as_group, column_of

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.objects import ObjectStore, StoreError, open_store
from phalanx.objects.faults import FaultyStore, fail_before, on
from phalanx.paging.layout import CUT
from phalanx.paging.state import PagedState
from phalanx.planner.memory import BUDGET_PARTS
from phalanx.snapshot.load import iterate
from phalanx.snapshot.paged import MIN_PART_BYTES, first_element, parts_of
from phalanx.snapshot.restore import RestoreReport, restore
from phalanx.snapshot.writer import Writer

PAGE_BYTES = 2 * 4 * CUT * 4


def paged(folder: Path, held: Sequence[HeldTensor]) -> list[HeldTensor]:
    """The same tensors and values, as moment 1 of pages in a file; moment 0 is left alone."""
    state = PagedState(folder, [each.box.num_elements for each in held], 2, BUDGET_PARTS * PAGE_BYTES)
    found = []
    for number, each in enumerate(held):
        moment = state.tensor(number, 1)
        moment.write(0, each.local)
        found.append(dataclasses.replace(each, local=each.local.to("meta"), paged=moment))
    return found


def values_of(held: Iterable[HeldTensor]) -> list[torch.Tensor]:
    """What the pages of each tensor hold."""
    found = []
    for each in held:
        assert each.paged is not None
        each.paged.pages.pin()
        pieces = [np.frombuffer(bytes(piece), np.float32) for piece in each.paged.pieces(0, each.box.num_elements)]
        each.paged.pages.release()
        found.append(torch.from_numpy(np.concatenate([np.empty(0, np.float32), *pieces])).view(each.box.shape))
    return found


def some_floats() -> dict[str, torch.Tensor]:
    shapes = {"a": (700, 1030), "b": (64,), "c": (), "d": (0, 3), "e": (3, 5, 7), "f": (40, 3000)}
    return {name: random_tensor(shape, torch.float32, n) for n, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2), (2, 5)])
def test_save_and_restore_in_another_layout_and_place_is_bit_equal(tmp_path: Path, before: int, after: int) -> None:
    store, tensors = file_store(tmp_path / "store"), some_floats()
    ranks = [paged(tmp_path / "disk", held) for held in rows_of(tensors, before)]
    manifest = save(store, open_attempt(store), 5, ranks, object_bytes=1 << 20)
    into_memory = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    into_pages = []
    for rank, held in enumerate(rows_of(into_memory, after)):
        restore(store, manifest, held, all_names=tensors)
        pages = paged(tmp_path / "disk", rows_of({n: torch.ones_like(t) for n, t in tensors.items()}, after)[rank])
        report = restore(store, manifest, pages, all_names=tensors)
        assert report.num_tensors == len(tensors)
        into_pages.append(pages)
    assert all(same_bits(into_memory[name], tensors[name]) for name in tensors)
    for held, expected in zip(into_pages, rows_of(tensors, after), strict=True):
        for found, each in zip(values_of(held), expected, strict=True):
            assert same_bits(found, each.local), each.name


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_tiling_and_replicas_are_bit_equal(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    tensors = {"t": random_tensor(shape, torch.float32, 1)}
    boxes = data.draw(tilings(shape))
    held = [HeldTensor("t", shape, box, tensors["t"][whole(shape).slices_of(box)]) for box in boxes]
    ranks = [paged(tmp_path, [each]) for each in held]
    store = open_store("memory://")
    manifest = save(store, open_attempt(store), 1, ranks)
    assert np.array_equal(dict(iterate(store, manifest.ref))["t"], tensors["t"].numpy(), equal_nan=True)
    into = [HeldTensor("t", shape, box, torch.zeros(box.shape)) for box in data.draw(tilings(shape))]
    pages = paged(tmp_path, into)
    restore(store, manifest, pages)
    for found, each in zip(values_of(pages), into, strict=True):
        expected = tensors["t"][whole(shape).slices_of(each.box)].contiguous()
        assert found.shape == expected.shape and (not found.numel() or same_bits(found, expected))


def test_replicas_write_a_piece_each_from_their_own_pages(tmp_path: Path) -> None:
    tensor = random_tensor((3000, 1000), torch.float32, 3)
    layout = [[HeldTensor("t", (3000, 1000), whole((3000, 1000)), tensor, rank, 4)] for rank in range(4)]
    store = file_store(tmp_path / "store")
    manifest = save(store, open_attempt(store), 1, [paged(tmp_path / "disk", held) for held in layout])
    sizes = [info.num_bytes for info in store.list("a00000001/") if info.key.endswith(".safetensors")]
    assert len(sizes) == 4 and max(sizes) - min(sizes) < 10_000
    found = {"t": torch.zeros(3000, 1000)}
    restore(store, manifest, whole_of(found))
    assert same_bits(found["t"], tensor)


def test_ranks_restore_parts_together_whatever_number_of_parts_each_has(tmp_path: Path) -> None:
    store, tensors = (
        file_store(tmp_path / "store"),
        some_floats() | {"g": random_tensor((2200, 1030), torch.float32, 9)},
    )
    manifest = save(store, open_attempt(store), 5, rows_of(tensors, 3))
    columns = [
        paged(tmp_path / "disk", column_of({n: torch.zeros_like(t) for n, t in tensors.items()}, rank, 2))
        for rank in range(2)
    ]
    columns[1] = columns[1][:3]
    assert len(list(parts_of(columns[0]))) > len(list(parts_of(columns[1]))) > 0
    reports = as_group(2, lambda peers: restore(store, manifest, columns[peers.rank], all_names=tensors, peers=peers))
    assert all(isinstance(report, RestoreReport) for report in reports), reports
    for rank in range(2):
        expected = column_of(tensors, rank, 2)[: len(columns[rank])]
        for found, each in zip(values_of(columns[rank]), expected, strict=True):
            assert same_bits(found, each.local.contiguous()), each.name


class Adding:
    """One tensor in pages, whose first moment grows by 1 with each update."""

    def __init__(self, folder: Path) -> None:
        self.state = PagedState(folder, [50_000], 1, 3 * BUDGET_PARTS * 4096)
        local = torch.empty(50_000, device="meta")
        self.held = [HeldTensor("t", (50_000,), Box((0,), (50_000,)), local, paged=self.state.tensor(0, 0))]

    def update(self) -> None:
        self.state.update(lambda chunks, planes: planes[0].add_(1.0))


def stored(store: ObjectStore, manifest_step: int, writer: Writer, adding: Adding, attempt: int) -> float:
    """The one value that a save holds, three updates going on meanwhile."""
    pending = writer.begin(attempt, manifest_step, adding.held)
    for _ in range(3):
        adding.update()
    part = pending.wait(30)
    key = next(info.key for info in store.list("") if f"s{manifest_step:08d}/objects" in info.key)
    assert part.num_bytes > 0
    values = np.unique(np.frombuffer(store.read(key)[-200_000:], np.float32))
    assert len(values) == 1
    return float(values[0])


def test_save_holds_the_values_of_its_beginning_while_updates_go_on_in_save_after_save(tmp_path: Path) -> None:
    store, adding = file_store(tmp_path / "store"), Adding(tmp_path / "disk")
    writer, attempt = Writer(store, 0, 1), open_attempt(store)
    adding.update()
    assert [stored(store, step, writer, adding, attempt) for step in (1, 2, 3)] == [1.0, 4.0, 7.0]


def test_failed_save_lets_go_of_its_pages_and_the_next_one_works(tmp_path: Path) -> None:
    store, adding = file_store(tmp_path / "store"), Adding(tmp_path / "disk")
    faulty = FaultyStore(store, [fail_before(on("commit", "objects/", nth=0), StoreError("injected"))])
    writer, attempt = Writer(faulty, 0, 1), open_attempt(store)
    with pytest.raises(StoreError, match="injected"):
        writer.save(attempt, 1, adding.held).wait(30)
    adding.update()
    assert stored(store, 2, writer, adding, attempt) == 1.0


@pytest.mark.parametrize(
    ("outer", "inner", "number"),
    [
        (Box((2, 5), (4, 9)), Box((2, 5), (4, 9)), 0),
        (Box((2, 5), (4, 9)), Box((3, 5), (2, 9)), 9),
        (Box((2, 5), (4, 9)), Box((4, 7), (1, 4)), 2 * 9 + 2),
        (Box((0, 0, 1), (2, 3, 5)), Box((1, 1, 1), (1, 2, 5)), 1 * 15 + 1 * 5),
        (Box((), ()), Box((), ()), 0),
    ],
)
def test_first_element_is_counted_in_row_major_order(outer: Box, inner: Box, number: int) -> None:
    assert first_element(outer, inner) == number


HELD_ROWS, HELD_COLUMNS = 3072, 4096  # 48 MiB
LIMIT_BYTES = 20 << 20


def restored_within(folder: Path, first: int, count: int, limit_bytes: int) -> subprocess.CompletedProcess[str]:
    """Columns [first, first + count) restored by a process that may not have more memory than that."""
    numbers = (HELD_ROWS, HELD_COLUMNS, first, count, 4 << 20, limit_bytes)
    program = Path(__file__).with_name("restore_within.py")
    command = [sys.executable, str(program), f"file://{folder}/store", str(folder / "disk"), *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_restore_of_pages_stays_within_a_hard_limit_whatever_is_stored(tmp_path: Path) -> None:
    store, tensor = file_store(tmp_path / "store"), random_tensor((HELD_ROWS, HELD_COLUMNS), torch.float32, 1)
    save(store, open_attempt(store), 5, [whole_of({"t": tensor})])
    for first, count in ((0, HELD_COLUMNS), (1536, 512)):
        done = restored_within(tmp_path, first, count, LIMIT_BYTES)
        assert done.returncode == 0, done.stderr
        expected = tensor[:, first : first + count].contiguous().numpy()
        assert done.stdout == xxhash.xxh3_64_hexdigest(expected)
    none = restored_within(tmp_path, 0, HELD_COLUMNS, 4 << 20)
    assert none.returncode == 1 and "alloc" in none.stderr, "a limit below one part is felt"


def test_part_of_columns_is_as_large_as_the_rows_that_are_read_for_it(tmp_path: Path) -> None:
    tensor = torch.zeros(2048, 64)
    held = [HeldTensor("t", (2048, 4096), Box((0, 64), (2048, 64)), tensor)]
    parts = list(parts_of(paged(tmp_path, held)))
    assert [[part.box.shape for part in batch] for batch in parts] == [[(MIN_PART_BYTES // 4 // 4096, 64)]] * 8
