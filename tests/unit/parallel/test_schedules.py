"""The facts of the schedules against torch's own schedules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.core.errors import PhalanxError
from phalanx.parallel.pipeline import check_pipeline, stage_shapes
from phalanx.parallel.schedules import SCHEDULES, is_v_shaped, multiple_of, schedule_named, stages_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_names_a_class_of_torch(name: str) -> None:
    cls = getattr(torch_schedules, SCHEDULES[name].class_name)
    assert issubclass(cls, torch_schedules.PipelineScheduleMulti) == SCHEDULES[name].many_stages


def test_schedule_of_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(PhalanxError, match="one of gpipe, 1f1b"):
        schedule_named("1f1")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_over_all_ranks_are_each_stage_once(name: str, pp: int) -> None:
    per_rank = 2 if SCHEDULES[name].many_stages else 1
    held = [stages_of(name, pp, rank, per_rank) for rank in range(pp)]
    assert sorted(sum(held, ())) == list(range(pp * per_rank))
    last_holder = next(rank for rank, stages in enumerate(held) if pp * per_rank - 1 in stages)
    assert last_holder == (0 if is_v_shaped(name) else pp - 1)


@pytest.mark.parametrize(("name", "count"), [("1f1b", 2), ("zbv", 3), ("interleaved_1f1b", 1)])
def test_stages_with_a_count_that_the_schedule_cannot_hold_are_refused(name: str, count: int) -> None:
    with pytest.raises(PhalanxError, match="stages_per_rank"):
        stages_of(name, 2, 0, count)


def test_multiple_of_is_what_each_schedule_admits() -> None:
    assert {name: multiple_of(name, 4) for name in SCHEDULES} == {
        "gpipe": 1,
        "1f1b": 4,
        "interleaved_1f1b": 4,
        "looped_bfs": 1,
        "interleaved_zero_bubble": 4,
        "zbv": 1,
        "dualpipev": 8,
    }
    assert all(multiple_of(name, 1) == 1 for name in SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "zero", "compiled", "key"),
    [("zbv", 3, False, "zero"), ("1f1b", 2, False, "zero"), ("dualpipev", 1, True, "compile")],
)
def test_pipeline_that_torch_gets_wrong_is_refused(schedule: str, zero: int, compiled: bool, key: str) -> None:
    with pytest.raises(PhalanxError, match=key):
        check_pipeline(schedule, zero, compiled=compiled)


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 3), ("gpipe", 1), ("zbv", 1)])
def test_pipeline_that_torch_gets_right_is_admitted(schedule: str, zero: int) -> None:
    check_pipeline(schedule, zero, compiled=False)


class _Giving(nn.Module):
    """A stage that gives `given` of its input's hidden states."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Any:
        return self.given(x.new_empty((*x.shape[:2], 8), dtype=torch.float32))


def test_shapes_of_stages_are_cut_over_the_sequence() -> None:
    stages = [_Giving(lambda hidden: hidden) for _ in range(2)]
    first, last = stage_shapes(stages, 3, 16, torch.bfloat16, cp=2, tp=2)
    assert (first.inputs, first.outputs) == ((3, 8), (3, 4, 8))
    assert (last.inputs, last.outputs) == ((3, 4, 8), (3, 8, 4))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda hidden: (hidden, hidden), "tuple"),
        (lambda hidden: hidden[:, 0], r"\(3, 8\)"),
        (lambda hidden: hidden[:, ::2], r"\(3, 8, 8\)"),
        (lambda hidden: hidden.mT, r"\(3, 8, 16\)"),
    ],
)
def test_stage_that_gives_no_hidden_states_of_whole_windows_is_refused_by_name(given: Any, told: str) -> None:
    stages = [_Giving(lambda hidden: hidden), _Giving(given)]
    with pytest.raises(
        PhalanxError, match=rf"^split_stages\(\) stage 1 is .*{told}.*one tensor \[3 windows, 16 tokens"
    ):
        stage_shapes(stages, 3, 16, torch.float32, cp=1, tp=1)
