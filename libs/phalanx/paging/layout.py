"""Where the elements of many flat tensors lie in pages of one size. Pure.

A page has a plane for each moment; a chunk, a run of elements of one tensor, lies at the same place of every plane. A
tensor is cut only behind a multiple of `CUT` elements, and a chunk begins on a cache line: kernels that go through a
tensor by vectors then treat every element as they would in the whole tensor, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ELEMENT_BYTES: Final = 4  # fp32
BLOCK_BYTES: Final = 4096  # what direct access to a disk is aligned to
CUT: Final = BLOCK_BYTES // ELEMENT_BYTES
_LINE: Final = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of tensor number `tensor`, from element `at` of each plane of its page on."""

    tensor: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """pages: the chunks of each. plane_elements: of one plane, a multiple of `CUT`. places: of each tensor, its chunks
    with the number of their page, in order.
    """

    num_planes: int
    plane_elements: int
    pages: tuple[tuple[Chunk, ...], ...]
    places: tuple[tuple[tuple[int, Chunk], ...], ...]

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane."""
        return self.plane_elements * ELEMENT_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all its planes."""
        return self.num_planes * self.plane_bytes


def page_layout(sizes: Sequence[int], num_planes: int, page_bytes: int) -> PageLayout:
    """Pages of at most `page_bytes` (at least one block a plane) for tensors of `sizes` elements, filled one after the
    other; smaller pages where all fit into less.
    """
    largest = max(CUT, page_bytes // (num_planes * BLOCK_BYTES) * CUT)
    needed = sum(_up(size, _LINE) for size in sizes)
    plane = min(largest, max(CUT, _up(needed, CUT)))
    pages: list[list[Chunk]] = []
    places: list[list[tuple[int, Chunk]]] = [[] for _ in sizes]
    filled = plane
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            room = plane - filled
            count = size - start if size - start <= room else room // CUT * CUT
            if not count:
                pages.append([])
                filled = 0
                continue
            chunk = Chunk(tensor, start, start + count, filled)
            pages[-1].append(chunk)
            places[tensor].append((len(pages) - 1, chunk))
            start += count
            filled += _up(count, _LINE)
    return PageLayout(num_planes, plane, tuple(map(tuple, pages)), tuple(map(tuple, places)))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
