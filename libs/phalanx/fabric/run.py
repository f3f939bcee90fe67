"""One run of `phalanx doctor --nproc`: gangs of ranks on this machine, each watched to its end.

gloo knows one all-reduce, so its plan has ring and tree made by hand. NCCL has both and chooses; it is made to take one
by NCCL_ALGO, which it reads when a communicator opens, so each gets a gang of its own after the first.

Where a pair or a rank is slow, other processes measure all pairs once more, and twice at most: what is named was slow
for each of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.fabric.plan import Plan
from phalanx.fabric.report import Report, report_of
from phalanx.gang import Budget, Event, ForkServer, Gang, GangOrder, GangOutcome, StopSignals, supervise
from phalanx.gang.order import LOOPBACK

ENTRY = "phalanx.fabric.rank:run_rank"
PRELOAD = ("torch", "torch.distributed", "phalanx.fabric.rank", "phalanx.fabric.operations", "phalanx.parallel.mesh")
MOST_REPEATS = 2
NCCL_ALGORITHMS = {"all_reduce_ring": "Ring", "all_reduce_tree": "Tree"}


@dataclass(frozen=True, slots=True)
class Hooks:
    """on_phase: gets the name of each phase as rank 0 enters it. on_start: gets each gang as it starts."""

    on_phase: Callable[[str], None] = lambda name: None
    on_start: Callable[[Gang], None] = lambda gang: None


@dataclass(frozen=True, slots=True)
class Place:
    """How ranks are started. entry: what they run, which must come to call `rank.run_rank`. address: under which they
    meet. environ: what is laid over their environment.
    """

    entry: str = ENTRY
    address: str = LOOPBACK
    environ: Mapping[str, str] = field(default_factory=dict)


def num_phases(plan: Plan) -> int:
    """How many phases `measure` tells of, where nothing is slow."""
    forced = sum(each.num_phases for _, each in _forced(plan))
    return plan.num_phases + forced


def measure(
    plan: Plan, server: ForkServer, hooks: Hooks, *, stop: StopSignals | None = None, place: Place | None = None
) -> tuple[GangOutcome, Report | None]:
    """Measures; the outcome names the rank that hung, died or raised, and then there is no report. Where NCCL fails
    with an algorithm that it was told to take, the report goes without it.
    """
    place = place or Place()
    outcome, events = _run(plan, server, hooks, stop, place)
    if not outcome.ok:
        return outcome, None
    for operation, forced in _forced(plan):
        environ = {**place.environ, "NCCL_ALGO": NCCL_ALGORITHMS[operation]}
        state, more = _run(forced, server, hooks, stop, replace(place, environ=environ))
        if state.state == "stopped":
            return state, None
        if state.ok:
            events += [replace(each, fields={**each.fields, "operation": operation}) for each in more]
    report = report_of(plan, events)
    for _ in range(MOST_REPEATS):
        if not (report.slow_pairs or report.slow_ranks):
            break
        outcome, more = _run(replace(plan, operations=()), server, hooks, stop, place)
        if not outcome.ok:
            return outcome, None
        events += more
        report = report_of(plan, events)
    return outcome, report


def _forced(plan: Plan) -> list[tuple[str, Plan]]:
    if plan.backend != "nccl":
        return []
    return [(name, replace(plan, operations=("all_reduce",), pairs_at_once=0)) for name in NCCL_ALGORITHMS]


def _run(
    plan: Plan, server: ForkServer, hooks: Hooks, stop: StopSignals | None, place: Place
) -> tuple[GangOutcome, list[Event]]:
    events: list[Event] = []

    def start(number: int) -> Gang:
        order = GangOrder(
            plan.world_size, place.entry, Path(folder), plan.to_json(), place.environ, address=place.address
        )
        gang = server.start(order)
        hooks.on_start(gang)
        return gang

    def on_event(event: Event) -> None:
        if event.kind in ("measured", "pair"):
            events.append(event)
        elif event.kind == "phase" and event.rank == 0:
            hooks.on_phase(event.fields["name"])

    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder:
        return supervise(start, Budget(1), on_event, stop_grace_s=0.0, stop=stop), events
