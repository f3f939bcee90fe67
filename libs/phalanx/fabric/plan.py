"""What is measured, in which order: the same list for the ranks, which go through it together, and for whoever counts
how far they are. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.spec import Layout

WORLD = "world"
# The collectives that training uses, and all-reduce made by hand out of messages, in the two ways that libraries know.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
BY_HAND = ("all_reduce_ring", "all_reduce_tree")
ELEMENT_BYTES = 4
SIZE_RATIO = 4
NUM_SWEEPS = 5
# The messages of a pair: a short one, whose time is latency, and a long one, whose time shows bandwidth.
SHORT_BYTES, LONG_BYTES = 8, 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """layout: of the world's ranks. device: "cpu" or "cuda". sizes: bytes of a collective, growing; what an operation
    counts as its size is said in `operations`. operations: those to measure over each axis. pairs_at_once: pairs that
    are measured at the same time; 0: no pairs. deadline_s: for each measurement. budget_s: what is spent on one, where
    MIN_ITERATIONS take less. network: `[cluster.network]` as a table.
    """

    layout: Layout
    device: str
    sizes: tuple[int, ...]
    operations: tuple[str, ...] = OPERATIONS
    pairs_at_once: int = 1
    deadline_s: float = 30.0
    budget_s: float = 0.1
    network: Mapping[str, Any] | None = None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def num_phases(self) -> int:
        """How many phases a rank reports: one for each measurement and each batch of pairs, and its first and last."""
        return sum(1 for _ in self.measurements()) + NUM_SWEEPS * len(self.batches()) + 2

    def measurements(self) -> Iterator[tuple[str, str, int]]:
        """(axis, operation, bytes), in order."""
        for axis in axes_of(self.layout):
            for operation in self.operations:
                for num_bytes in self.sizes:
                    yield axis, operation, num_bytes

    def batches(self) -> list[tuple[tuple[int, int], ...]]:
        """The pairs of one sweep, those of a batch at once: every pair comes once, no rank twice in a batch."""
        if not self.pairs_at_once:
            return []
        rounds = rounds_of(self.world_size)
        step = self.pairs_at_once
        return [tuple(each[at : at + step]) for each in rounds for at in range(0, len(each), step)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Plan:
        typed = {name: tuple(fields[name]) for name in ("sizes", "operations")}
        return Plan(**{**fields, **typed, "layout": Layout(**fields["layout"])})


def axes_of(layout: Layout) -> tuple[str, ...]:
    """The axes over which anything is exchanged, and the world where no axis is the world."""
    sizes = axis_sizes(layout)
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    return axes if layout.world_size in sizes.values() else (*axes, WORLD)


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Ranks of one group of each axis. Weights are sharded over dp_shard and cp together; where one of the two is 1,
    the other is that.
    """
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate}
    if layout.dp_shard > 1 and layout.cp > 1:
        sizes["dp_shard_cp"] = layout.dp_shard * layout.cp
    elif layout.dp_shard > 1:
        sizes["dp_shard"] = layout.dp_shard
    return {**sizes, "cp": layout.cp, "tp": layout.tp}


def sizes_between(least: int, most: int) -> tuple[int, ...]:
    """Bytes from `least` on, each SIZE_RATIO times the one before, and `most` as the last."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= SIZE_RATIO
    return (*sizes, most)


def rounds_of(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every pair of ranks meets once and no rank has two partners: the circle method of tournaments
    (one rank stays, the others turn by one place each round). With an odd number one rank rests each round.
    """
    circle: Sequence[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    half, rounds = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
