"""The order of the windows within a period of a mixture: each source spread evenly, by a closed form; pure.

Sources are halved again and again into a tree (Huffman's, by weight), and each branching deals its windows out as
evenly as whole numbers allow: of the first r windows that a branching with `left` of `total` windows deals,
round(r x left / total) go left. So at any place each source is within two windows or so of its share, a place costs
one step a level, and the inverse is as direct.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Branch:
    """Two halves, each a source's number or another branching; members: the sources in each."""

    left: Branch | int
    right: Branch | int
    left_members: tuple[int, ...]
    right_members: tuple[int, ...]


Tree: TypeAlias = Branch | int


def tree_of(weights: Sequence[Fraction]) -> Tree:
    """Huffman's tree over the sources with a weight above 0, of which there must be one; ties by number."""
    ties = count(len(weights))
    heap: list[tuple[Fraction, int, Tree, tuple[int, ...]]] = [
        (weight, source, source, (source,)) for source, weight in enumerate(weights) if weight > 0
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, _, right, right_members = heapq.heappop(heap)
        large, _, left, left_members = heapq.heappop(heap)
        branch = Branch(left, right, left_members, right_members)
        heapq.heappush(heap, (small + large, next(ties), branch, left_members + right_members))
    return heap[0][2]


def place(tree: Tree, counts: Sequence[int], places: Int64) -> tuple[Int64, Int64]:
    """Source, and number among that source's windows of the period, of each place of a period; int64 [n] each.

    counts: windows of each source in the period; places below their sum.
    """
    sources, numbers = np.empty_like(places), np.empty_like(places)
    todo: list[tuple[Tree, Int64, Int64]] = [(tree, np.arange(len(places)), places)]
    while todo:
        node, rows, r = todo.pop()
        if isinstance(node, int):
            sources[rows], numbers[rows] = node, r
            continue
        left, total = _sizes(node, counts)
        if not len(r):
            continue
        gone = _dealt_left(r, left, total)
        goes_left = _dealt_left(r + 1, left, total) > gone
        todo.append((node.left, rows[goes_left], gone[goes_left]))
        todo.append((node.right, rows[~goes_left], (r - gone)[~goes_left]))
    return sources, numbers


def places_of(tree: Tree, counts: Sequence[int], source: int, numbers: Int64) -> Int64:
    """The inverse of `place`: where in the period the windows of these numbers of `source` lie."""
    for node, goes_left in reversed(_path(tree, source)):
        left, total = _sizes(node, counts)
        odd = 2 * numbers + 1
        # The first r at which round((r + 1) x left / total) reaches number + 1; likewise for what is not dealt left.
        numbers = -(-odd * total // (2 * left)) - 1 if goes_left else odd * total // (2 * (total - left))
    return numbers


def first_counts(tree: Tree, counts: Sequence[int], length: int) -> tuple[int, ...]:
    """Windows of each source among the first `length` of a period."""
    found = [0] * len(counts)
    todo: list[tuple[Tree, int]] = [(tree, length)]
    while todo:
        node, r = todo.pop()
        if isinstance(node, int):
            found[node] = r
            continue
        left, total = _sizes(node, counts)
        gone = (2 * r * left + total) // (2 * total) if total else 0
        todo += [(node.left, gone), (node.right, r - gone)]
    return tuple(found)


def _dealt_left(r: Int64, left: int, total: int) -> Int64:
    dealt: Int64 = (2 * r * left + total) // (2 * total)
    return dealt


def _sizes(node: Branch, counts: Sequence[int]) -> tuple[int, int]:
    left = sum(counts[member] for member in node.left_members)
    return left, left + sum(counts[member] for member in node.right_members)


def _path(tree: Tree, source: int) -> list[tuple[Branch, bool]]:
    """The branchings from the root down to a source, and whether it lies left in each."""
    path: list[tuple[Branch, bool]] = []
    while not isinstance(tree, int):
        goes_left = source in tree.left_members
        path.append((tree, goes_left))
        tree = tree.left if goes_left else tree.right
    assert tree == source
    return path
