"""The state of an optimizer in pages of a file: updated page by page, others being read and written meanwhile; and read
for a checkpoint while updates go on.

Every page has two slots in the file. A checkpoint pins the slots that are current when it begins; until it lets go, an
update writes a pinned page to its other slot, so neither waits for the other. Killed anywhere: the file goes with the
process, and the checkpoint is what a new one begins from.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from phalanx.paging.file import PageFile
from phalanx.paging.layout import BLOCK_BYTES, CUT, ELEMENT_BYTES, Chunk, PageLayout, page_layout
from phalanx.paging.ring import go_round
from phalanx.planner.memory import DISK_SLOTS, PAGE_BUFFERS, page_bytes

_PIECE_BYTES: Final = 4 << 20
Update = Callable[[Sequence[Chunk], Sequence[torch.Tensor]], None]


class PagedState:
    """`num_moments` zeros of every element of tensors of `sizes`, fp32. budget_bytes: of memory for buffers."""

    def __init__(
        self, folder: Path, sizes: Sequence[int], num_moments: int, budget_bytes: int, *, direct: bool = True
    ) -> None:
        self.layout: PageLayout = page_layout(sizes, num_moments, page_bytes(budget_bytes))
        num_pages = len(self.layout.pages)
        self.file = PageFile(folder, DISK_SLOTS * num_pages * self.layout.page_bytes, direct=direct)
        self._buffers = _buffers(self.layout, min(PAGE_BUFFERS, num_pages))
        self._slots = [0] * num_pages
        self._pinned: list[int] | None = None
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Of the buffers of an update, and of the piece that a checkpoint reads."""
        return (len(self._buffers) + 1) * self.layout.page_bytes

    @property
    def part_bytes(self) -> int:
        """Of one page."""
        return self.layout.page_bytes

    def update(self, act: Update) -> None:
        """Runs `act(chunks, planes)` of every page in order and keeps what it writes to the planes (one a moment, fp32
        [plane_elements]). Raises what `act` does, and DiskError; after either the state is no longer whole.
        """
        go_round(
            len(self.layout.pages),
            len(self._buffers),
            self._read,
            lambda page, buffer: act(self.layout.pages[page], self._buffers[buffer].planes),
            self._write,
        )
        self.file.settle()

    def _read(self, page: int, buffer: int) -> None:
        self.file.read(self._offset(page, self._slots[page]), self._buffers[buffer].memory)

    def _write(self, page: int, buffer: int) -> None:
        with self._lock:
            slot = self._slots[page]
            if self._pinned is not None and self._pinned[page] == slot:
                slot = 1 - slot
        self.file.write(self._offset(page, slot), self._buffers[buffer].memory)
        self._slots[page] = slot

    def _offset(self, page: int, slot: int) -> int:
        return (DISK_SLOTS * page + slot) * self.layout.page_bytes

    def pin(self) -> None:
        """Keeps the values of now for `pieces`, until `release`. One pin at a time, and between updates."""
        with self._lock:
            assert self._pinned is None, "a checkpoint is being read already"
            self._pinned = list(self._slots)

    def release(self) -> None:
        """Lets go of what `pin` keeps; without a pin nothing happens."""
        with self._lock:
            self._pinned = None

    def tensor(self, tensor: int, moment: int) -> MomentPages:
        """One moment of one tensor."""
        return MomentPages(self, tensor, moment)

    def ranges(self, tensor: int, moment: int, start: int, stop: int) -> Iterator[_Range]:
        """Where elements [start, stop) of a moment lie, in order, in pieces of bounded size."""
        most = min(_PIECE_BYTES, self.layout.plane_bytes) // ELEMENT_BYTES
        for page, chunk in self.layout.places[tensor]:
            first, end = max(start, chunk.start), min(stop, chunk.stop)
            plane = moment * self.layout.plane_elements
            while first < end:
                at = plane + chunk.at + first - chunk.start
                count = min(end - first, most - at % CUT)
                yield _Range(page, at, count)
                first += count

    def read(self, part: _Range, memory: mmap.mmap, *, pinned: bool) -> memoryview:
        """The bytes of a range, in `memory`."""
        slots = self._pinned if pinned else self._slots
        assert slots is not None, "pin() comes first"
        view = memoryview(memory)[: part.block_bytes]
        self.file.read(self._offset(part.page, slots[part.page]) + part.block_start, view)
        return view[part.skipped_bytes : part.skipped_bytes + part.count * ELEMENT_BYTES]

    def overwrite(self, part: _Range, values: torch.Tensor, memory: mmap.mmap) -> None:
        """Puts fp32 `values` [count] in the place of a range; not while a checkpoint is read."""
        assert self._pinned is None, "what a checkpoint reads must not change"
        found = self.read(part, memory, pinned=False)
        torch.frombuffer(found, dtype=torch.float32).copy_(values)
        offset = self._offset(part.page, self._slots[part.page]) + part.block_start
        self.file.write(offset, memoryview(memory)[: part.block_bytes])

    def scratch(self) -> mmap.mmap:
        """Memory for one `read` or `overwrite` at a time."""
        return _memory(min(_PIECE_BYTES, self.layout.plane_bytes))

    def close(self) -> None:
        """Frees the file."""
        self.file.close()


@dataclass(frozen=True, slots=True)
class _Range:
    """`count` elements of a page from its element `at` on, and the blocks of the file that hold them."""

    page: int
    at: int
    count: int

    @property
    def skipped_bytes(self) -> int:
        return self.at % CUT * ELEMENT_BYTES

    @property
    def block_start(self) -> int:
        return self.at // CUT * BLOCK_BYTES

    @property
    def block_bytes(self) -> int:
        return -(-(self.at % CUT + self.count) // CUT) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class MomentPages:
    """One moment of one tensor, by its elements' numbers (`phalanx.core.box.PagedTensor`)."""

    pages: PagedState
    tensor: int
    moment: int

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes of elements [start, stop) as they were at `pages.pin()`, in order; each piece is valid until the next
        is asked for. Raises DiskError.
        """
        memory = self.pages.scratch()
        for part in self.pages.ranges(self.tensor, self.moment, start, stop):
            yield self.pages.read(part, memory, pinned=True)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Puts fp32 `values`, row-major, from element `start` on. Raises DiskError."""
        flat, done = values.detach().reshape(-1), 0
        memory = self.pages.scratch()
        for part in self.pages.ranges(self.tensor, self.moment, start, start + flat.numel()):
            self.pages.overwrite(part, flat[done : done + part.count], memory)
            done += part.count


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory of a page: aligned as direct access wants it, and as tensors."""

    memory: memoryview
    planes: tuple[torch.Tensor, ...]


def _buffers(layout: PageLayout, count: int) -> list[_Buffer]:
    """In one piece of huge pages where the system has them: direct access looks up and holds each page of memory that
    it reads into or writes from, which of small ones takes more time than the rest of a request.
    """
    if not count:
        return []
    memory = _memory(count * layout.page_bytes)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    planes = torch.frombuffer(memory, dtype=torch.float32).view(count, layout.num_planes, -1)
    size = layout.page_bytes
    return [
        _Buffer(memoryview(memory)[number * size : (number + 1) * size], planes[number].unbind())
        for number in range(count)
    ]


def _memory(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(BLOCK_BYTES, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
