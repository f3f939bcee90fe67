"""The planner's orders against the lists of torch's own schedules."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.core.errors import PhalanxError
from phalanx.parallel import schedules as trainer_schedules
from phalanx.planner.pipeline_order import SCHEDULES, rank_orders, rank_stages

CLASSES = {name: facts.class_name for name, facts in trainer_schedules.SCHEDULES.items()}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Recorder:
    """A stage that computes nothing and notes what torch's schedule asks of it."""

    is_last = False

    def __init__(self, index, num_stages):
        self.stage_index, self.num_stages, self.asked = index, num_stages, []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.asked.append([("F", self.stage_index, micro_batch)])

    def backward_one_chunk(self, micro_batch, **_):
        self.asked.append([("B", self.stage_index, micro_batch)])

    def perform_reduce_grad(self, _):
        pass

    def __getattr__(self, name):
        if name.startswith("get_"):
            return lambda _: []
        raise AttributeError(name)


def torch_run(schedule, pp, micro_batches, monkeypatch):
    """What torch's loop runs on every rank, of a schedule that has no list of it."""
    cls, ran = getattr(torch_schedules, CLASSES[schedule]), []
    monkeypatch.setattr(cls, "_initialize_stage", lambda *_: None)
    for rank in range(pp):
        stage = Recorder(rank, pp)
        cls(stage, micro_batches)._step_microbatches([()] * micro_batches)
        ran.append(stage.asked)
    return ran


def torch_order(schedule, pp, per_rank, micro_batches):
    """(kind, stage, micro-batch) of every rank, from torch; stages need no module, process group or device for it."""
    stages = [
        SimpleNamespace(
            group_size=pp, group_rank=0, num_stages=pp * per_rank, stage_index=index, submod=None, is_last=False
        )
        for index in rank_stages(schedule, pp, per_rank)[0]
    ]
    cls = getattr(torch_schedules, CLASSES[schedule])
    built = cls(stages, micro_batches)
    return [[each for each in map(plain, built.pipeline_order[rank]) if each] for rank in range(pp)]


def plain(action):
    if action is None or "REDUCE_GRAD" in action.computation_type.name:
        return []
    parts = action.sub_actions or (action,)
    return [(LETTERS[each.computation_type.name], each.stage_index, each.microbatch_index) for each in parts]


def cases():
    for pp in (1, 2, 3, 4, 8):
        for schedule in SCHEDULES:
            per_ranks = (1,) if schedule in ("gpipe", "1f1b") else (2,)
            if schedule.startswith(("interleaved", "looped")):
                per_ranks = (2, 3)
            for per_rank in per_ranks:
                for rounds in (1, 2, 5):
                    yield schedule, pp, per_rank, pp * rounds * (2 if schedule == "dualpipev" else 1)
    yield from (("zbv", 4, 2, 3), ("zbv", 4, 2, 9), ("interleaved_1f1b", 4, 2, 10), ("interleaved_1f1b", 4, 2, 3))


@pytest.mark.parametrize(("schedule", "pp", "per_rank", "micro_batches"), list(cases()))
def test_order_is_that_of_torch(schedule, pp, per_rank, micro_batches, monkeypatch):
    ours = [
        [(str(each.kind), each.stage, each.micro_batch) for each in order]
        for order in rank_orders(schedule, pp, per_rank, micro_batches)
    ]
    if per_rank == 1:
        theirs = torch_run(schedule, pp, micro_batches, monkeypatch)
    else:
        theirs = torch_order(schedule, pp, per_rank, micro_batches)
    assert ours == [list(chain.from_iterable(rank)) for rank in theirs]


@pytest.mark.parametrize("pp", [2, 4])
def test_pairs_are_what_torch_overlaps(pp):
    theirs = [[tuple(each) for each in rank if len(each) == 2] for rank in torch_order("dualpipev", pp, 2, 4 * pp)]
    for order, pairs in zip(rank_orders("dualpipev", pp, 2, 4 * pp), theirs, strict=True):
        paired = [(str(each.kind), each.stage, each.micro_batch) for each in order if each.paired]
        assert list(zip(paired[::2], paired[1::2], strict=True)) == pairs


@pytest.mark.parametrize("schedule", trainer_schedules.SCHEDULES)
def test_stages_lie_where_the_trainer_puts_them(schedule):
    per_rank = 2 if trainer_schedules.SCHEDULES[schedule].many_stages else 1
    placed = tuple(trainer_schedules.stages_of(schedule, 4, rank, per_rank) for rank in range(4))
    assert rank_stages(schedule, 4, per_rank) == placed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f2b", 2, 1, 4), "one of gpipe, 1f1b"),
        (("1f1b", 0, 1, 4), "at least 1 rank"),
        (("1f1b", 2, 2, 4), "1 for schedule 1f1b"),
        (("zbv", 2, 3, 4), "2 for schedule zbv"),
        (("dualpipev", 4, 2, 7), "at least 8"),
        (("interleaved_1f1b", 2, 2, 5), "a multiple of pp = 2"),
    ],
)
def test_counts_that_a_schedule_does_not_admit_are_refused(arguments, said):
    with pytest.raises(PhalanxError, match=said):
        rank_orders(*arguments)
