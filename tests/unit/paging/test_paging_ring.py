"""Pages that go round in buffers: their order, what goes on at once, and what fails."""

from __future__ import annotations

import errno
import os
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.paging import file as page_file
from phalanx.paging.file import DiskError
from phalanx.paging.ring import go_round
from phalanx.paging.state import PagedState
from phalanx.planner.memory import BUDGET_PARTS, PAGE_BUFFERS

WAIT_S = 20.0


def nothing(page: int, buffer: int) -> None:
    """A move that does not count."""


def ring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "optimizer-pages"]


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 7])
@pytest.mark.parametrize("num_pages", [0, 1, 2, 7, 50])
def test_each_page_is_read_computed_and_written_in_a_buffer_that_nobody_else_has(
    num_pages: int, num_buffers: int
) -> None:
    moves: dict[int, list[tuple[str, int]]] = defaultdict(list)
    computed: list[int] = []

    def compute(page: int, buffer: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        moves[buffer].append(("compute", page))
        computed.append(page)

    go_round(
        num_pages,
        num_buffers,
        lambda page, buffer: moves[buffer].append(("read", page)),
        compute,
        lambda page, buffer: moves[buffer].append(("write", page)),
    )
    assert computed == list(range(num_pages))
    for buffer in range(min(num_buffers, num_pages)):
        pages = range(buffer, num_pages, num_buffers)
        assert moves[buffer] == [(move, page) for page in pages for move in ("read", "compute", "write")]
    assert len(moves) == min(num_buffers, num_pages) and not ring_threads()


def test_all_buffers_are_read_at_once_and_a_slow_write_holds_up_only_its_own() -> None:
    reading = threading.Barrier(4)
    rest_is_computed = threading.Event()

    def read(page: int, buffer: int) -> None:
        if page < 4:
            reading.wait(WAIT_S)

    def compute(page: int, buffer: int) -> None:
        if page == 3:
            rest_is_computed.set()

    def write(page: int, buffer: int) -> None:
        if page == 0:
            assert rest_is_computed.wait(WAIT_S), "pages 1 to 3 wait for the write of page 0"

    go_round(9, 4, read, compute, write)


@pytest.mark.parametrize("page", [0, 5, 8])
@pytest.mark.parametrize("move", ["read", "compute", "write"])
def test_what_fails_is_raised_when_all_threads_have_ended(move: str, page: int) -> None:
    computed: list[int] = []

    def failing(name: str, this: int) -> None:
        if (name, this) == (move, page):
            raise PhalanxError("page", value=this, expected="another", remedy="none")

    def compute(this: int, buffer: int) -> None:
        computed.append(this)
        failing("compute", this)

    with pytest.raises(PhalanxError, match=f"page is {page}"):
        go_round(9, 3, lambda this, _: failing("read", this), compute, lambda this, _: failing("write", this))
    assert not ring_threads()
    assert computed == list(range(len(computed))) and len(computed) <= min(9, page + 3)


def test_update_begins_a_thread_a_buffer_however_many_pages_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = PagedState(tmp_path, [200 * 1024], 1, BUDGET_PARTS * 4096)
    begun = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), start(thread)))
    state.update(lambda chunks, planes: None)
    assert len(state.layout.pages) == 200 and len(begun) == PAGE_BUFFERS


def test_read_that_fails_behind_a_write_is_told_and_ends_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = PagedState(tmp_path, [200 * 1024], 1, BUDGET_PARTS * 4096)
    computed = []
    read = os.preadv

    def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 100 * state.layout.page_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    monkeypatch.setattr(page_file.os, "preadv", refusing)
    with pytest.raises(DiskError, match="Input/output error"):
        state.update(lambda chunks, planes: computed.append(len(chunks)))
    assert 50 <= len(computed) <= 50 + PAGE_BUFFERS and not ring_threads()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_buffers_lie_in_huge_pages(tmp_path: Path) -> None:
    state = PagedState(tmp_path, [4 << 20], 2, BUDGET_PARTS * (4 << 20))
    address = state._buffers[-1].planes[-1].data_ptr()
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            first, last = (int(number, 16) for number in name.split("-"))
            is_ours = first <= address < last
        elif name == "VmFlags:" and is_ours:
            assert "hg" in rest.split()
            return
    pytest.fail("the buffer lies in no mapping")
