"""The facts of the schedules against torch's own schedules, and what is refused."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.core.errors import PhalanxError
from phalanx.parallel.pipeline import check_pipeline
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
