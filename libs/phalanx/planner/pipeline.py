"""A pipeline step, simulated event by event: when each rank computes what, how long it idles, what it holds.

A rank runs its actions in the order of its schedule, each as soon as its input is there. A forward waits for the stage
before, a backward for the stage after (the last stage's for its own forward), one hop `p2p_s` later where the two lie
on different ranks. Hops take no time of a rank: what a rank has meanwhile to compute hides them, nothing else does. A
paired forward and backward (DualPipeV) start together and take what `pair_saving` leaves of their sum; 0, the
default, is what torch 2.13 does: one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from phalanx.core.errors import PhalanxError
from phalanx.planner.pipeline_order import Action, Kind, Order, rank_orders, rank_stages


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What one micro-batch costs on each stage, in the order of the model.

    forward_s, input_s, weight_s: seconds of forward and of the two halves of backward. p2p_s: seconds of a hop between
    ranks. activation_bytes: held from a forward to its backward. kept_for_weights: the part of them that stays between
    the two halves of a split backward (all of it in torch, which keeps the graph). pair_saving: 0 to 1.
    first_is_whole: the first stage, which nobody waits for, does nothing for its inputs and all of a split backward for
    its weights, as torch 2.13 does.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    p2p_s: float = 0.0
    activation_bytes: tuple[float, ...] = ()
    kept_for_weights: float = 1.0
    pair_saving: float = 0.0
    first_is_whole: bool = False

    @classmethod
    def even(
        cls,
        num_stages: int,
        forward_s: float,
        input_s: float,
        weight_s: float,
        *,
        p2p_s: float = 0.0,
        activation_bytes: float = 1.0,
    ) -> StageCosts:
        """Every stage alike."""
        every = (forward_s,) * num_stages, (input_s,) * num_stages, (weight_s,) * num_stages
        return cls(*every, p2p_s, (activation_bytes,) * num_stages)

    def seconds(self, action: Action) -> float:
        """How long an action takes by itself."""
        stage, kind = action.stage, action.kind
        if kind is Kind.FORWARD:
            return self.forward_s[stage]
        whole = self.input_s[stage] + self.weight_s[stage]
        if kind is Kind.BACKWARD:
            return whole
        if self.first_is_whole and stage == 0:
            return whole if kind is Kind.BACKWARD_WEIGHT else 0.0
        return self.input_s[stage] if kind is Kind.BACKWARD_INPUT else self.weight_s[stage]


@dataclass(frozen=True, slots=True)
class Interval:
    """An action and when it ran, seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankRun:
    """What one pipeline rank did. memory: (second, bytes of activations held from then on), in order of time."""

    pp_rank: int
    intervals: tuple[Interval, ...]
    memory: tuple[tuple[float, float], ...]

    @cached_property
    def busy_s(self) -> float:
        """Seconds computed."""
        return sum(each.end_s - each.start_s for each in self.intervals)

    @cached_property
    def peak_bytes(self) -> float:
        """Most bytes of activations held at once."""
        return max((held for _, held in self.memory), default=0.0)

    def idle(self, makespan_s: float) -> tuple[tuple[float, float], ...]:
        """Gaps as (start, end), from the start of the step to its end."""
        edges = [0.0, *(edge for each in self.intervals for edge in (each.start_s, each.end_s)), makespan_s]
        return tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start)


@dataclass(frozen=True)
class PipelineRun:
    """A simulated step of every pipeline rank."""

    schedule: str
    micro_batches: int
    ranks: tuple[RankRun, ...]

    @cached_property
    def makespan_s(self) -> float:
        """From the first forward to the end of the last backward."""
        return max(rank.intervals[-1].end_s for rank in self.ranks)

    @cached_property
    def busy_s(self) -> float:
        """Seconds computed, over all ranks."""
        return sum(rank.busy_s for rank in self.ranks)

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks' time: (p - 1) / (m + p - 1) for an even 1F1B."""
        return 1.0 - self.busy_s / (len(self.ranks) * self.makespan_s)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time by what the work alone takes: (p - 1) / m for an even 1F1B (Narayanan et al. 2021, 2.2.1)."""
        return len(self.ranks) * self.makespan_s / self.busy_s - 1.0


def simulate(schedule: str, pp: int, stages_per_rank: int, micro_batches: int, costs: StageCosts) -> PipelineRun:
    """A step of `micro_batches` micro-batches over pp ranks.

    Raises PhalanxError for counts that the schedule does not admit, or costs of another number of stages.
    """
    orders = rank_orders(schedule, pp, stages_per_rank, micro_batches)
    if len({pp * stages_per_rank, *map(len, (costs.forward_s, costs.input_s, costs.weight_s))}) != 1:
        raise PhalanxError(
            "stage costs",
            value=len(costs.forward_s),
            expected=f"one for each of the {pp * stages_per_rank} stages",
            remedy="give forward_s, input_s and weight_s for every stage",
        )
    owners = {stage: rank for rank, stages in enumerate(rank_stages(schedule, pp, stages_per_rank)) for stage in stages}
    ran = _Simulation(orders, costs, [owners[stage] for stage in range(len(owners))], micro_batches).run()
    return PipelineRun(
        schedule,
        micro_batches,
        tuple(RankRun(rank, tuple(ran[rank]), _held(ran[rank], costs)) for rank in range(pp)),
    )


def bubble_left(
    schedule: str, pp: int, stages_per_rank: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    """The part of a plain 1F1B's bubble, (p - 1) (F + I + W), that a schedule leaves with even stages; 1 for 1F1B.

    Simulated over at most four ranks: the bubble of each of these schedules grows as p - 1 (DualPipeV's within a
    tenth) and not with the micro-batches.
    """
    return _bubble_left(schedule, min(pp, 4), stages_per_rank, forward_s, input_s, weight_s)


@lru_cache(maxsize=256)
def _bubble_left(
    schedule: str, pp: int, stages_per_rank: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    if pp == 1:
        return 0.0
    micro_batches, work_s = 2 * pp, forward_s + input_s + weight_s
    each = (seconds / stages_per_rank for seconds in (forward_s, input_s, weight_s))
    run = simulate(schedule, pp, stages_per_rank, micro_batches, StageCosts.even(pp * stages_per_rank, *each))
    return (run.makespan_s - micro_batches * work_s) / ((pp - 1) * work_s)


class _Simulation:
    """Runs every rank as far as its inputs reach, wakes the rank that waits for each new output, until all are done."""

    def __init__(self, orders: tuple[Order, ...], costs: StageCosts, owners: Sequence[int], micro_batches: int) -> None:
        self.orders, self.costs, self.owners, self.micro_batches = orders, costs, owners, micro_batches
        unknown = [-1.0] * (len(owners) * micro_batches)
        self.forward_ends, self.backward_ends = unknown, list(unknown)
        self.clock = [0.0] * len(orders)
        self.ran: list[list[Interval]] = [[] for _ in orders]

    def run(self) -> list[list[Interval]]:
        """The intervals of every rank."""
        runnable = list(range(len(self.orders)))
        waiting: dict[tuple[bool, int], int] = {}
        while runnable:
            rank = runnable.pop()
            needed = self._advance(rank, waiting, runnable)
            if needed is not None:
                waiting[needed] = rank
        assert not waiting, f"the order can't be run: ranks {sorted(waiting.values())} wait for each other"
        return self.ran

    def _advance(self, rank: int, waiting: dict[tuple[bool, int], int], runnable: list[int]) -> tuple[bool, int] | None:
        """Runs a rank until an input is missing, which is returned as (is forward, index), or to its end: None."""
        order, ran = self.orders[rank], self.ran[rank]
        while len(ran) < len(order):
            action = order[len(ran)]
            together = (action, order[len(ran) + 1]) if action.paired else (action,)
            inputs = [(each, needed) for each in together for needed in self._inputs(each) if needed is not None]
            start = self.clock[rank]
            for each, needed in inputs:
                ready = self._ready(each, needed)
                if ready is None:
                    return needed
                start = max(start, ready)
            for each in together:
                key = self._run(rank, each, start)
                start = self.clock[rank]
                if key is not None and key in waiting:
                    runnable.append(waiting.pop(key))
        return None

    def _inputs(self, action: Action) -> tuple[tuple[bool, int] | None, ...]:
        """What an action reads of others: (is forward, stage x micro-batches + micro-batch)."""
        last, stage = len(self.owners) - 1, action.stage
        if action.kind is Kind.BACKWARD_WEIGHT:
            return (None,)
        if action.kind is Kind.FORWARD:
            return ((True, (stage - 1) * self.micro_batches + action.micro_batch) if stage else None,)
        forward = (True, stage * self.micro_batches + action.micro_batch)
        if stage == last:
            return (forward,)
        return (forward, (False, (stage + 1) * self.micro_batches + action.micro_batch))

    def _ready(self, action: Action, needed: tuple[bool, int]) -> float | None:
        """When an input has arrived; None while nobody has computed it."""
        is_forward, index = needed
        ended = (self.forward_ends if is_forward else self.backward_ends)[index]
        if ended < 0:
            return None
        source = self.owners[index // self.micro_batches]
        return ended + (self.costs.p2p_s if source != self.owners[action.stage] else 0.0)

    def _run(self, rank: int, action: Action, start: float) -> tuple[bool, int] | None:
        """Runs one action; what it gives to others."""
        taken = self.costs.seconds(action) * (1.0 - self.costs.pair_saving * action.paired)
        end = self.clock[rank] = start + taken
        self.ran[rank].append(Interval(action, start, end))
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None
        is_forward, index = action.kind is Kind.FORWARD, action.stage * self.micro_batches + action.micro_batch
        (self.forward_ends if is_forward else self.backward_ends)[index] = end
        return is_forward, index


def _held(intervals: Sequence[Interval], costs: StageCosts) -> tuple[tuple[float, float], ...]:
    """Bytes of activations over time: a forward takes them at its start, the end of its backward gives them back."""
    sizes = costs.activation_bytes or (1.0,) * len(costs.forward_s)
    held, steps = 0.0, [(0.0, 0.0)]
    for each in intervals:
        size, kind = sizes[each.action.stage], each.action.kind
        if kind is Kind.FORWARD:
            held += size
            steps.append((each.start_s, held))
            continue
        part = {Kind.BACKWARD: 1.0, Kind.BACKWARD_WEIGHT: costs.kept_for_weights}
        held -= size * part.get(kind, 1.0 - costs.kept_for_weights)
        steps.append((each.end_s, held))
    return tuple(steps)
