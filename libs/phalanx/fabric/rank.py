"""What a rank of `phalanx doctor` does: goes through the plan together with all others and reports its times.

Each measurement is a phase with the plan's deadline, so that the gang's watch names a rank that hangs in it. Events:
`measured` (axis, operation, num_bytes, ranks, times_s: of each iteration) and `pair` (ranks, sweep, latency_s, time_s).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.core.errors import PhalanxError
from phalanx.fabric.plan import LONG_BYTES, NUM_SWEEPS, SHORT_BYTES, WORLD, Plan
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.spec.network import Network
from phalanx.trainer.network import enter_network

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

MIN_ITERATIONS, MOST_ITERATIONS = 5, 50
# How often a pair sends a message there and back.
SHORT_TIMES, LONG_TIMES = 20, 20
MEETING_DEADLINE_S = 120.0
# How much later than the watch a collective gives up: until then the rank that hangs is found, by its stack.
TIMEOUT_MARGIN_S = 30.0


def run_rank(context: RankContext, at_end: Callable[[Store], None] = lambda store: None) -> None:
    """Entry of a rank; context.arguments: a Plan as JSON. at_end: gets the ranks' store once all is measured. Raises
    PhalanxError where this host lacks a GPU or what the network's settings name.
    """
    import torch.distributed as dist

    from phalanx.parallel.mesh import build_mesh
    from phalanx.trainer.device import open_device

    plan = Plan.from_json(context.arguments)
    if plan.device == "cuda":
        enter_network(Network(**(plan.network or {})))
        _require_gpu()
    device = open_device(plan.device, deterministic=False)
    phases = _Phases(context, plan.deadline_s)
    phases.enter("meeting of the ranks", max(MEETING_DEADLINE_S, plan.deadline_s))
    store = init_process_group(context, max(MEETING_DEADLINE_S, 2 * plan.deadline_s) + TIMEOUT_MARGIN_S, plan.backend)
    groups = build_mesh(plan.layout, device).groups
    world = dist.group.WORLD
    assert world is not None
    for axis, operation, num_bytes in plan.measurements():
        phases.enter(f"{operation} over {axis}, {num_bytes:,} bytes")
        group = world if axis == WORLD else groups["dp_shard_cp" if axis == "dp_shard" else axis]
        times_s = _timed(operation, num_bytes, group, device, plan.budget_s)
        context.report(
            "measured",
            axis=axis,
            operation=operation,
            num_bytes=num_bytes,
            ranks=dist.get_process_group_ranks(group),
            times_s=times_s,
        )
    _measure_pairs(context, plan, device, phases)
    phases.enter("end")
    at_end(store)
    dist.barrier()
    dist.destroy_process_group()


class _Phases:
    """Numbers the phases, which all ranks enter in the same order."""

    def __init__(self, context: RankContext, deadline_s: float) -> None:
        self._context, self._deadline_s, self._number = context, deadline_s, 0

    def enter(self, name: str, deadline_s: float | None = None) -> None:
        self._context.report("phase", name=name, step=self._number, deadline_s=deadline_s or self._deadline_s)
        self._number += 1


def _require_gpu() -> None:
    import torch

    found, local_rank = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(os.environ["LOCAL_RANK"])
    if local_rank >= found:
        raise PhalanxError(
            "--device",
            value="cuda",
            expected=f"a GPU for each rank of this host, where torch finds {found}",
            remedy="lower --nproc, or measure with --device cpu",
        )


def _timed(
    operation: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device, budget_s: float
) -> list[float]:
    """Seconds of each of as many iterations as `budget_s` allows, the same number on all ranks, after two that are not
    counted: the first opens connections, the second says how long one takes.
    """
    import torch
    import torch.distributed as dist

    from phalanx.fabric.operations import prepared

    call = prepared(operation, num_bytes, group, device)
    call()
    with _stopwatch(device) as watch:
        call()
    longest = torch.tensor([watch.time_s], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    wanted = int(budget_s / max(longest.item(), 1e-9))
    times_s = []
    for _ in range(max(MIN_ITERATIONS, min(MOST_ITERATIONS, wanted))):
        with _stopwatch(device) as watch:
            call()
        times_s.append(watch.time_s)
    return times_s


class _Watch:
    time_s = 0.0


@contextmanager
def _stopwatch(device: torch.device) -> Iterator[_Watch]:
    """Wall time of what the block orders, until the device has done it."""
    import torch

    watch = _Watch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    yield watch
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    watch.time_s = time.perf_counter() - start_s


def _measure_pairs(context: RankContext, plan: Plan, device: torch.device, phases: _Phases) -> None:
    import torch.distributed as dist

    for sweep in range(NUM_SWEEPS):
        for batch in plan.batches():
            names = ", ".join(f"{a}-{b}" for a, b in batch)
            phases.enter(f"ranks {names}, sweep {sweep + 1} of {NUM_SWEEPS}")
            mine = [pair for pair in batch if context.rank in pair]
            for pair in mine:
                latency_s = _there_and_back(pair, context.rank, SHORT_BYTES, SHORT_TIMES, device)
                time_s = _there_and_back(pair, context.rank, LONG_BYTES, LONG_TIMES, device)
                if context.rank == pair[0]:
                    context.report("pair", ranks=pair, sweep=sweep, latency_s=latency_s, time_s=time_s)
            dist.barrier()


def _there_and_back(pair: Sequence[int], rank: int, num_bytes: int, times: int, device: torch.device) -> float:
    """Seconds of a message one way: half the least of `times` there and back, after one that opens the connection."""
    import torch
    import torch.distributed as dist

    message, other = torch.zeros(num_bytes, dtype=torch.uint8, device=device), pair[1] if rank == pair[0] else pair[0]
    halves_s = []
    for _ in range(times + 1):
        with _stopwatch(device) as watch:
            if rank == pair[0]:
                dist.send(message, other)
                dist.recv(message, other)
            else:
                dist.recv(message, other)
                dist.send(message, other)
        halves_s.append(watch.time_s / 2)
    return min(halves_s[1:])
