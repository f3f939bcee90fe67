"""The pipeline schedules by the names of the job file: torch's class, stages a rank, placement, and the micro-batch
counts they admit.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.planner.stage_split import stages_of_rank


@dataclass(frozen=True, slots=True)
class Schedule:
    """Facts of one schedule.

    class_name: in torch.distributed.pipelining.schedules. many_stages: a rank holds several stages.
    v_shaped: rank r holds stages r and 2 pp - 1 - r, so that the last stage (and the loss) lies on rank 0.
    zero_bubble: splits the backward into inputs and weights. micro_batches_per_rank: their number must be a multiple of
    this times pp; 0 where any number will do.
    """

    class_name: str
    many_stages: bool = False
    v_shaped: bool = False
    zero_bubble: bool = False
    micro_batches_per_rank: int = 0


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B", micro_batches_per_rank=1),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", many_stages=True, micro_batches_per_rank=1),
    "looped_bfs": Schedule("ScheduleLoopedBFS", many_stages=True),
    "interleaved_zero_bubble": Schedule(
        "ScheduleInterleavedZeroBubble", many_stages=True, zero_bubble=True, micro_batches_per_rank=1
    ),
    "zbv": Schedule("ScheduleZBVZeroBubble", many_stages=True, v_shaped=True, zero_bubble=True),
    "dualpipev": Schedule(
        "ScheduleDualPipeV", many_stages=True, v_shaped=True, zero_bubble=True, micro_batches_per_rank=2
    ),
}


def schedule_named(name: str) -> Schedule:
    """The schedule's facts; PhalanxError where the name is unknown."""
    if name not in SCHEDULES:
        raise PhalanxError(
            "[parallel] schedule", value=name, expected=f"one of {', '.join(SCHEDULES)}", remedy="choose one of them"
        )
    return SCHEDULES[name]


def is_v_shaped(name: str) -> bool:
    """Whether the last stage lies on the first pipeline rank."""
    return schedule_named(name).v_shaped


def multiple_of(name: str, pp: int) -> int:
    """What the number of slots is rounded up to a multiple of, so that the schedule admits it as its micro-batches."""
    return 1 if pp == 1 else max(1, schedule_named(name).micro_batches_per_rank * pp)


def stages_of(name: str, pp: int, pp_rank: int, stages_per_rank: int) -> tuple[int, ...]:
    """Global indices of the stages that pipeline rank `pp_rank` holds, in the order of the model."""
    schedule = schedule_named(name)
    admitted = "1" if not schedule.many_stages else "2" if schedule.v_shaped else "2 or more"
    count_is_right = (stages_per_rank == 2) if schedule.v_shaped else (stages_per_rank > 1) == schedule.many_stages
    if not count_is_right:
        raise PhalanxError(
            "[parallel] stages_per_rank",
            value=stages_per_rank,
            expected=f"{admitted} for schedule {name}",
            remedy="change stages_per_rank or schedule",
        )
    return stages_of_rank(name, pp, pp_rank, stages_per_rank)
