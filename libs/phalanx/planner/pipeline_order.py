"""What each pipeline rank computes, and in which order, for every schedule: pure lists of actions.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965, section 2.2); 1F1B and interleaved 1F1B (Narayanan et al. 2021,
arXiv 2104.04473, sections 2.2.1 and 2.2.2); interleaved zero bubble, which with one stage a rank is ZB-H1 in ZB-1p's
memory (Qi et al. 2023, arXiv 2401.10241, section 2); ZB-V (Qi et al. 2024, arXiv 2405.15362, section 4); DualPipeV (its
README and DeepSeek-V3, arXiv 2412.19437, section 3.2.1); looped breadth-first (Lamy-Poirier 2023, arXiv 2211.05953,
section 4). Where those leave the order open (warm-up of the interleaved ones, which weights' backward fills which gap,
the end of DualPipeV), it is the one of torch 2.13, which the trainer runs; the tests hold both lists together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from phalanx.core.errors import PhalanxError
from phalanx.spec.parallel import V_SCHEDULES

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")


class Kind(StrEnum):
    """What an action computes: forward, whole backward, or one half of it, for the inputs or for the weights."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One computation. paired: this forward and the backward that follows it may overlap (DualPipeV)."""

    kind: Kind
    stage: int
    micro_batch: int
    paired: bool = False


Order = tuple[Action, ...]


def rank_stages(schedule: str, pp: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """The stages of every pipeline rank, in the order of the model: r, r + pp, ..., or r and 2 pp - 1 - r for a V."""
    if schedule in V_SCHEDULES:
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(range(rank, pp * stages_per_rank, pp)) for rank in range(pp))


def rank_orders(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> tuple[Order, ...]:
    """The actions of every pipeline rank, in order.

    pp, stages_per_rank, micro_batches: counts, at least 1. Raises PhalanxError for an unknown schedule and for counts
    that the schedule does not admit.
    """
    _check(schedule, pp, stages_per_rank, micro_batches)
    stages = rank_stages(schedule, pp, stages_per_rank)
    return tuple(tuple(_ORDERS[schedule](pp, rank, stages[rank], micro_batches)) for rank in range(pp))


def _check(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> None:
    if schedule not in _ORDERS:
        raise PhalanxError(
            "schedule", value=schedule, expected=f"one of {', '.join(_ORDERS)}", remedy="choose one of them"
        )
    if min(pp, stages_per_rank, micro_batches) < 1:
        raise PhalanxError(
            "pipeline",
            value=(pp, stages_per_rank, micro_batches),
            expected="at least 1 rank, 1 stage a rank and 1 micro-batch",
            remedy="raise the count that is below 1",
        )
    admitted = 1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule in V_SCHEDULES else stages_per_rank
    if stages_per_rank != admitted:
        raise PhalanxError(
            "stages_per_rank",
            value=stages_per_rank,
            expected=f"{admitted} for schedule {schedule}",
            remedy="change stages_per_rank or the schedule",
        )
    if schedule == "dualpipev" and micro_batches < 2 * pp:
        raise PhalanxError(
            "micro_batches",
            value=micro_batches,
            expected=f"at least {2 * pp}, one for each stage, for schedule dualpipev",
            remedy="raise the global batch or lower pp",
        )
    if schedule.startswith("interleaved") and micro_batches % max(1, micro_batches // pp):
        raise PhalanxError(
            "micro_batches",
            value=micro_batches,
            expected=f"a multiple of pp = {pp} for schedule {schedule}",
            remedy="change the global batch or the local one",
        )


def _gpipe(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    every = range(micro_batches)
    return [Action(kind, stages[0], each) for kind in (Kind.FORWARD, Kind.BACKWARD) for each in every]


def _looped_bfs(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    every = range(micro_batches)
    forwards = [Action(Kind.FORWARD, stage, each) for stage in stages for each in every]
    backwards = [Action(Kind.BACKWARD, stage, each) for stage in reversed(stages) for each in reversed(every)]
    return forwards + backwards


def _one_f_one_b(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    return _alternate(stages, micro_batches, pp, warmup=pp - 1 - rank)


def _interleaved(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    size = _round_size(pp, micro_batches)
    return _alternate(stages, micro_batches, size, warmup=(len(stages) - 1) * size + 2 * (pp - 1 - rank))


def _interleaved_zero_bubble(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    size = _round_size(pp, micro_batches)
    warmup = (len(stages) - 1) * size + pp - 1 - rank
    return _alternate(stages, micro_batches, size, warmup=warmup, weights_behind=rank)


def _round_size(pp: int, micro_batches: int) -> int:
    """Micro-batches that pass a stage before the rank's next stage has its turn."""
    return micro_batches // max(1, micro_batches // pp)


def _alternate(
    stages: tuple[int, ...], micro_batches: int, round_size: int, *, warmup: int, weights_behind: int | None = None
) -> list[Action]:
    """Forwards of the warm-up, then a forward and a backward in turn, then the backwards that are left.

    Both walk the stages in rounds of `round_size` micro-batches, the backwards from the last stage on. weights_behind:
    by how many backwards that of the weights trails that of the inputs; None: not split.
    """
    passes = [
        (chunk, first + offset)
        for first in range(0, micro_batches, round_size)
        for chunk in range(len(stages))
        for offset in range(min(round_size, micro_batches - first))
    ]
    forwards = [Action(Kind.FORWARD, stages[chunk], each) for chunk, each in passes]
    split = weights_behind is not None
    kind = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
    backwards = [Action(kind, stages[-1 - chunk], each) for chunk, each in passes]
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for done, backward in enumerate(backwards):
        order += forwards[warmup + done : warmup + done + 1]
        order.append(backward)
        if weights_behind is not None and done >= weights_behind:
            order.append(backwards[done - weights_behind]._replace(kind=Kind.BACKWARD_WEIGHT))
    if weights_behind:
        order += [each._replace(kind=Kind.BACKWARD_WEIGHT) for each in backwards[-weights_behind:]]
    return order


class _Writer:
    """An order being written, for the two stages of a V: counts the micro-batches of each kind and stage itself."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.stages = stages
        self.order: list[Action] = []
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.pending: deque[Action] = deque()

    def add(self, kind: Kind, half: int, *, paired: bool = False) -> None:
        """The next micro-batch of a kind on the first (0) or second (1) stage."""
        counted = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind
        action = Action(kind, self.stages[half], self.done[counted, half], paired)
        self.done[counted, half] += 1
        self.order.append(action)
        if kind is Kind.BACKWARD_INPUT:
            self.pending.append(action._replace(kind=Kind.BACKWARD_WEIGHT))

    def weight(self) -> None:
        """The oldest backward of weights that waits, if one does."""
        if self.pending:
            self.order.append(self.pending.popleft())

    def weights_of(self, half: int) -> None:
        """All backwards of weights that wait for a stage."""
        stage = self.stages[half]
        self.order += [each for each in self.pending if each.stage == stage]
        self.pending = deque(each for each in self.pending if each.stage != stage)

    def pair(self, forward: int, backward: int) -> None:
        """A forward and a whole backward that may overlap."""
        self.add(Kind.FORWARD, forward, paired=True)
        self.add(Kind.BACKWARD, backward, paired=True)


def _zbv(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    written, forward, inputs = _Writer(stages), Kind.FORWARD, Kind.BACKWARD_INPUT
    # The pattern needs 2 pp - 1 micro-batches to close; those beyond the real ones are dropped at its end.
    count = max(2 * pp - 1, micro_batches)

    def backward(half: int) -> None:
        written.add(inputs, half)
        written.weight()

    for _ in range(2 * (pp - rank) - 1):
        written.add(forward, 0)
    for _ in range(rank):
        written.add(forward, 1)
        written.add(forward, 0)
    for _ in range(pp - rank):
        written.add(forward, 1)
        backward(1)
    while written.done[forward, 1] < count:
        if written.done[forward, 0] < count:
            written.add(forward, 0)
        backward(0)
        written.add(forward, 1)
        backward(1)
    for _ in range(rank):
        written.add(inputs, 0)
        written.add(inputs, 1)
    for _ in range(pp - rank):
        written.add(inputs, 0)
        oldest = next(each for each in written.pending if each.stage == stages[0])
        written.pending.remove(oldest)
        written.order.append(oldest)
    written.weights_of(1)
    written.weights_of(0)
    return [action for action in written.order if action.micro_batch < micro_batches]


def _dualpipev(pp: int, rank: int, stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    written, behind = _Writer(stages), pp - 1 - rank
    for _ in range(2 * behind):
        written.add(Kind.FORWARD, 0)
    for _ in range(rank + 1):
        written.add(Kind.FORWARD, 0)
        written.add(Kind.FORWARD, 1)
    for _ in range(behind):
        written.add(Kind.BACKWARD_INPUT, 1)
        written.weight()
        written.add(Kind.FORWARD, 1)
    for turn in range(micro_batches - 2 * pp + rank + 1):
        if turn == 0 and behind == 0:
            written.add(Kind.FORWARD, 0)
            written.add(Kind.BACKWARD, 1)
        else:
            written.pair(0, 1)
        written.pair(1, 0)
    for _ in range(behind):
        written.add(Kind.BACKWARD, 1)
        written.pair(1, 0)
    # In the second half of these, weights wait: they fill the gaps of the end.
    for turn in range(2 * (rank + 1)):
        written.add(Kind.BACKWARD if turn <= rank else Kind.BACKWARD_INPUT, (turn + 1) % 2)
    for _ in range(behind):
        written.weight()
        written.add(Kind.BACKWARD_INPUT, 0)
    while written.pending:
        written.weight()
    return written.order


_ORDERS: dict[str, Callable[[int, int, tuple[int, ...], int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _interleaved,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
    "looped_bfs": _looped_bfs,
}
SCHEDULES = tuple(_ORDERS)
