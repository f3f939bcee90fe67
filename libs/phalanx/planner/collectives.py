"""Seconds of collective operations by alpha-beta: each step costs a latency, each byte its time on the narrowest link.

Rings pass S / n bytes 2 (n - 1) times for an all-reduce, half as often for its halves; a tree passes all of S up and
down in pieces, with log2 of the nodes as latency, so it wins where messages are small and nodes many (Thakur et al.
2005; the formulas that NCCL chooses by, src/graph/tuning.cc). A ring over nodes leaves each of them through every rank
that it has there, so its bandwidth is that of `inner` network links, or of the fast links if they are narrower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """latency_s: of one step, seconds. bytes_per_s: one way."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that speak to each other: `inner` of them in each fast domain, joined by `fast`, the domains by `slow` (the
    link of one rank)."""

    ranks: int
    inner: int
    fast: Link
    slow: Link

    @property
    def domains(self) -> int:
        """Fast domains that the group lies in."""
        return math.ceil(self.ranks / self.inner)

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth of a ring through all ranks."""
        if self.domains == 1:
            return self.fast.bytes_per_s
        through_network = self.inner * self.slow.bytes_per_s
        return min(self.fast.bytes_per_s, through_network) if self.inner > 1 else through_network


def _ring_latency_s(group: Group) -> float:
    between = group.domains - 1 if group.domains > 1 else 0
    return (group.ranks - 1 - between) * group.fast.latency_s + between * group.slow.latency_s


def all_gather_s(num_bytes: float, group: Group) -> float:
    """Every rank ends with `num_bytes`, of which it held 1 / ranks."""
    if group.ranks <= 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    return _ring_latency_s(group) + share * num_bytes / group.ring_bytes_per_s


def reduce_scatter_s(num_bytes: float, group: Group) -> float:
    """Every rank gives `num_bytes` and ends with the sum of its 1 / ranks: as long as an all-gather."""
    return all_gather_s(num_bytes, group)


def all_reduce_s(num_bytes: float, group: Group) -> float:
    """The faster of ring and tree."""
    return min(ring_all_reduce_s(num_bytes, group), tree_all_reduce_s(num_bytes, group))


def ring_all_reduce_s(num_bytes: float, group: Group) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * all_gather_s(num_bytes, group)


def tree_all_reduce_s(num_bytes: float, group: Group) -> float:
    """Up and down a double binary tree over the domains, a chain inside each."""
    if group.ranks <= 1:
        return 0.0
    inside = (group.inner - 1) * group.fast.latency_s
    between = math.log2(group.domains) * group.slow.latency_s if group.domains > 1 else 0.0
    return 2 * (inside + between) + 2 * num_bytes / group.ring_bytes_per_s


def tree_crossing_bytes(group: Group) -> float:
    """The size below which a tree is faster than a ring; 0 where it never is."""
    if group.ranks <= 1:
        return 0.0
    saved = ring_all_reduce_s(0, group) - tree_all_reduce_s(0, group)
    extra_s_per_byte = 2 / group.ranks / group.ring_bytes_per_s
    return max(0.0, saved / extra_s_per_byte)


def all_to_all_s(num_bytes: float, group: Group) -> float:
    """Every rank sends `num_bytes`, 1 / ranks of them to each; both kinds of links work at once."""
    if group.ranks <= 1:
        return 0.0
    fast_bytes = num_bytes * (group.inner - 1) / group.ranks
    slow_bytes = num_bytes * (group.ranks - group.inner) / group.ranks
    latency = group.slow.latency_s if group.domains > 1 else group.fast.latency_s
    return latency + max(fast_bytes / group.fast.bytes_per_s, slow_bytes / group.slow.bytes_per_s)


def send_s(num_bytes: float, group: Group) -> float:
    """From one rank to its neighbour in the group."""
    if group.ranks <= 1:
        return 0.0
    link = group.fast if group.domains == 1 else group.slow
    return link.latency_s + num_bytes / link.bytes_per_s
