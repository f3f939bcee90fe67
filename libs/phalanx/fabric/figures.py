"""From times to figures: bandwidths as nccl-tests defines them, latency and bandwidth as a line, and where ring and
tree cross. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Where two lines differ by less than this part of the greater, no crossing of theirs is believed.
_ALIKE = 0.05


def bus_factor(operation: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what part of an operation's size each rank's link must carry at least
    (nccl-tests, doc/PERFORMANCE.md: 2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather, reduce-scatter and
    all-to-all, 1 for messages).
    """
    share = (num_ranks - 1) / num_ranks
    if operation.startswith("all_reduce"):
        return 2 * share
    return 1.0 if operation == "send_recv" else share


def algorithm_gb_s(num_bytes: int, time_s: float) -> float:
    """10^9 bytes a second: size over time (nccl-tests' algbw)."""
    return num_bytes / time_s / 1e9


@dataclass(frozen=True, slots=True)
class Line:
    """Time of a message as latency_s + num_bytes x s_per_byte (the alpha-beta model of Hockney, Parallel Computing 20,
    1994). error: the greatest relative distance of a measured time from the line.
    """

    latency_s: float
    s_per_byte: float
    error: float

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes * self.s_per_byte

    @property
    def gb_s(self) -> float | None:
        """10^9 bytes a second for large messages; None where time does not grow with size."""
        return 1e-9 / self.s_per_byte if self.s_per_byte > 0 else None


def fit(times_s: Mapping[int, float]) -> Line:
    """The line through times by bytes, at least two of them, that makes the sum of squared relative errors least;
    neither of its parts is below 0.
    """
    assert len(times_s) >= 2 and min(times_s.values()) > 0
    points = [(float(num_bytes), time_s) for num_bytes, time_s in times_s.items()]
    # In u = 1 / t and v = S / t the residual is alpha u + beta v - 1: normal equations of two unknowns.
    uu = sum((1 / t) ** 2 for _, t in points)
    uv = sum(size / t**2 for size, t in points)
    vv = sum((size / t) ** 2 for size, t in points)
    u, v = sum(1 / t for _, t in points), sum(size / t for size, t in points)
    determinant = uu * vv - uv * uv
    alpha, beta = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if alpha < 0:
        alpha, beta = 0.0, v / vv
    elif beta < 0:
        alpha, beta = u / uu, 0.0
    error = max(abs(alpha + beta * size - t) / t for size, t in points)
    return Line(alpha, beta, error)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Up to which size a tree is faster than a ring. num_bytes: None where there is none. said: that in words."""

    num_bytes: int | None
    said: str


def crossing(ring: Mapping[int, float], tree: Mapping[int, float], num_ranks: int) -> Crossing:
    """Where all-reduce as a ring gets faster than as a tree: a ring sends 2 (n - 1) times, but only 2 (n - 1) / n of
    the data, a tree 2 log2 n times all of it. Both by bytes: times of the same sizes.

    By the lines through both; beyond what was measured a crossing is told, with that it is foretold.
    """
    if num_ranks < 3:
        return Crossing(None, "with 2 ranks ring and tree send the same: no crossing")
    lines = fit(ring), fit(tree)
    latency_gain, rate_loss = lines[0].latency_s - lines[1].latency_s, lines[1].s_per_byte - lines[0].s_per_byte
    if latency_gain > 0 and rate_loss > 0:
        at = round(latency_gain / rate_loss)
        least, most = min(ring), max(ring)
        if at <= least:
            return Crossing(None, "the ring is faster at every size that was measured: no crossing")
        how = f"the tree is faster below {size_text(at)}, the ring above"
        return Crossing(at, how if at <= most else f"{how} (foretold: the greatest measured is {size_text(most)})")
    faster = "ring" if sum(ring[size] < tree[size] for size in ring) * 2 > len(ring) else "tree"
    if all(abs(ring[size] - tree[size]) <= _ALIKE * max(ring[size], tree[size]) for size in ring):
        return Crossing(None, "ring and tree take the same time at every size: no crossing")
    return Crossing(None, f"the {faster} is faster throughout: no crossing")


def size_text(num_bytes: int) -> str:
    """Bytes as people write them: 96 B, 4 KiB, 1.5 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def time_text(time_s: float) -> str:
    """Seconds as people write short ones: 38.9 us, 53.3 ms, 1.2 s."""
    value = time_s * 1e6
    for unit in ("us", "ms", "s"):
        if value < 1000 or unit == "s":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def lower_quartile(values: Sequence[float]) -> float:
    """Of values that are not empty: one of them, of four the least."""
    return sorted(values)[(len(values) - 1) // 4]


def median(values: Sequence[float]) -> float:
    """Of values that are not empty."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
