"""State in pages of a file: where elements lie, updates page by page, pins, and disks that refuse."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.paging import file as page_file
from phalanx.paging.file import DiskError, PageFile
from phalanx.paging.layout import CUT, Chunk, page_layout
from phalanx.paging.state import PagedState
from phalanx.planner.memory import BUDGET_PARTS, DISK_SLOTS

SIZES = (5000, 0, 7, 1, 20_000, 64, 3 * CUT)
BUDGET = BUDGET_PARTS * 2 * 2 * CUT * 4  # pages of two planes of two blocks


@pytest.mark.parametrize("page_bytes", [1, 8192, 3 * 8192 + 5, 1 << 20])
@pytest.mark.parametrize("num_planes", [1, 2, 3])
def test_layout_holds_every_element_once_and_cuts_where_kernels_do(num_planes: int, page_bytes: int) -> None:
    layout = page_layout(SIZES, num_planes, page_bytes)
    assert layout.page_bytes <= max(page_bytes, num_planes * 4096) and layout.plane_elements % CUT == 0
    for number, size in enumerate(SIZES):
        chunks = [chunk for _, chunk in layout.places[number]]
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])][: len(chunks)]
        assert sum(chunk.stop - chunk.start for chunk in chunks) == size
        assert all(chunk.stop % CUT == 0 for chunk in chunks[:-1])
    for page, chunks in enumerate(layout.pages):
        assert all(chunk.at % 16 == 0 for chunk in chunks)
        ends = [0, *(chunk.at + chunk.stop - chunk.start for chunk in chunks)]
        assert all(end <= chunk.at for end, chunk in zip(ends, chunks, strict=False)), "none lies on another"
        assert ends[-1] <= layout.plane_elements
        assert all((page, chunk) in layout.places[chunk.tensor] for chunk in chunks)


def test_layout_of_little_takes_little() -> None:
    assert page_layout([3, 5], 2, 1 << 30).page_bytes == 2 * 4096
    assert page_layout([0, 0], 2, 1 << 30).pages == () and page_layout([], 2, 1 << 30).pages == ()


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> PagedState:
    return PagedState(tmp_path / "pages", SIZES, 2, BUDGET, direct=request.param)


def added(amount: float) -> object:
    """An update that adds to every element of moment m `amount` times (its number in its tensor + m)."""

    def act(chunks: Sequence[Chunk], planes: Sequence[torch.Tensor]) -> None:
        for chunk in chunks:
            numbers = torch.arange(chunk.start, chunk.stop, dtype=torch.float32)
            for moment, plane in enumerate(planes):
                plane[chunk.at : chunk.at + len(numbers)] += amount * (numbers + moment)

    return act


def values_of(state: PagedState, tensor: int, moment: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """As a checkpoint reads them; the pin is the caller's."""
    pieces = state.tensor(tensor, moment).pieces(start, SIZES[tensor] if stop is None else stop)
    found = [torch.frombuffer(bytearray(piece), dtype=torch.float32) for piece in pieces]
    return torch.cat(found) if found else torch.zeros(0)


def require(state: PagedState, amount: float) -> None:
    for tensor, size in enumerate(SIZES):
        for moment in range(2):
            expected = amount * (torch.arange(size, dtype=torch.float32) + moment)
            assert torch.equal(values_of(state, tensor, moment), expected), (tensor, moment)


def test_updates_reach_every_element_and_begin_at_zero(state: PagedState) -> None:
    assert len(state.layout.pages) > 5
    state.pin()
    require(state, 0.0)
    state.release()
    for _ in range(3):
        state.update(added(0.5))  # type: ignore[arg-type]
    state.pin()
    require(state, 1.5)


def test_pinned_values_stay_while_updates_go_on_and_the_newest_are_there_afterwards(state: PagedState) -> None:
    state.update(added(1.0))  # type: ignore[arg-type]
    state.pin()
    for _ in range(3):
        state.update(added(1.0))  # type: ignore[arg-type]
        require(state, 1.0)
    state.release()
    state.pin()
    require(state, 4.0)
    state.update(added(1.0))  # type: ignore[arg-type]
    require(state, 4.0)
    state.release()
    with pytest.raises(AssertionError, match="pin"):
        values_of(state, 0, 0)


@pytest.mark.parametrize(("start", "stop"), [(0, 20_000), (1, 2), (1023, 1025), (4096, 8192), (777, 19_001), (5, 5)])
def test_parts_are_read_and_written_at_any_element(state: PagedState, start: int, stop: int) -> None:
    state.update(added(1.0))  # type: ignore[arg-type]
    given = -torch.arange(stop - start, dtype=torch.float32)
    state.tensor(4, 1).write(start, given)
    expected = torch.arange(20_000, dtype=torch.float32) + 1
    expected[start:stop] = given
    state.pin()
    assert torch.equal(values_of(state, 4, 1), expected)
    assert torch.equal(values_of(state, 4, 1, start, stop), given)
    assert torch.equal(values_of(state, 4, 0), torch.arange(20_000, dtype=torch.float32)), "the other moment is left"
    assert torch.equal(values_of(state, 5, 1), torch.arange(64, dtype=torch.float32) + 1), "so is the next tensor"


def test_file_has_no_name_and_all_of_its_space(tmp_path: Path) -> None:
    state = PagedState(tmp_path / "pages", SIZES, 2, BUDGET)
    assert list((tmp_path / "pages").iterdir()) == []
    found = os.fstat(state.file.fd)
    assert found.st_size == DISK_SLOTS * len(state.layout.pages) * state.layout.page_bytes <= found.st_blocks * 512
    state.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(state.file.fd)


def test_system_without_unnamed_files_gets_one_whose_name_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not offered")
        return real(path, flags, *rest)

    monkeypatch.setattr(page_file.os, "open", refusing)
    file = PageFile(tmp_path, 8192)
    assert list(tmp_path.iterdir()) == [] and os.fstat(file.fd).st_nlink == 0


def test_state_of_nothing_takes_no_page(tmp_path: Path) -> None:
    state = PagedState(tmp_path, [0, 0], 2, BUDGET)
    state.update(added(1.0))  # type: ignore[arg-type]
    state.pin()
    assert list(state.tensor(0, 1).pieces(0, 0)) == [] and os.fstat(state.file.fd).st_size == 0


def test_memory_stays_within_the_budget(state: PagedState) -> None:
    assert state.memory_bytes <= BUDGET


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["posix_fallocate", "preadv", "pwritev"])
def test_disk_that_refuses_is_one_line_that_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refusing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    made = PagedState(tmp_path, SIZES, 2, BUDGET)
    monkeypatch.setattr(page_file.os, call, refusing)
    with pytest.raises(DiskError, match=os.strerror(number)) as found:
        made.update(added(1.0))  # type: ignore[arg-type]
        PagedState(tmp_path, SIZES, 2, BUDGET)
    assert str(tmp_path) in str(found.value) and "\n" not in str(found.value)
    assert isinstance(found.value, OutsideError)


def test_write_back_that_failed_is_told_at_the_end_of_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = PagedState(tmp_path, SIZES, 2, BUDGET, direct=False)

    def refusing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(page_file.os, "fdatasync", refusing)
    with pytest.raises(DiskError, match="write back"):
        state.update(added(1.0))  # type: ignore[arg-type]


def test_update_that_raises_waits_for_its_threads_and_says_why(state: PagedState) -> None:
    def act(chunks: Sequence[Chunk], planes: Sequence[torch.Tensor]) -> None:
        raise ValueError("by the update")

    with pytest.raises(ValueError, match="by the update"):
        state.update(act)
    state.close()


def test_folder_that_is_a_file_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(PhalanxError, match=r"optimizer.offload_folder is .*taken"):
        PageFile(tmp_path / "taken", 4096)


def test_file_that_ends_early_is_told(tmp_path: Path) -> None:
    file = PageFile(tmp_path, 4096, direct=False)
    with pytest.raises(DiskError, match="ends at byte"):
        file.read(0, memoryview(bytearray(8192)))
