"""Synthetic runs, as train would tell them: for tests of the monitor, its page and its clients.

`Told` numbers what is told; its records go to `Board.observe` or to a train of a test. `tell_run` tells a whole run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.expert_load import ExpertHeat, ExpertLoad
from phalanx.monitor.board import Board

TOKENS_A_STEP = 65_536


class Told:
    """What one train tells of one job, numbered. number: of the last thing told."""

    def __init__(self, job: str, log_id: str = "log-1", number: int = 0) -> None:
        self.job, self.log_id, self.number = job, log_id, number
        self.attempt, self.revision = 1, 0
        self._since_start_s = 0.0

    def event(self, kind: str, state: str, **fields: Any) -> train_pb.WatchRecordsResponse:
        """An event of the job, such as `event("starting", "running", attempt=1)`."""
        self.revision += 1
        self.number += 1
        event = train_pb.JobEvent(
            revision=self.revision,
            type=train_pb.JobEventType.Value(f"JOB_EVENT_TYPE_{kind.upper()}"),
            state=train_pb.JobState.Value(f"JOB_STATE_{state.upper()}"),
            **fields,
        )
        event.time.GetCurrentTime()
        return train_pb.WatchRecordsResponse(log_id=self.log_id, number=self.number, job=self.job, event=event)

    def record(self, rank: int = 0, took_s: float = 0.0, **event: Any) -> train_pb.WatchRecordsResponse:
        """A record of a rank, such as `record(phase=Phase(...))`; `took_s` after the one before."""
        self._since_start_s += took_s
        self.number += 1
        record = record_pb.Record(rank=rank, attempt=self.attempt, since_start_s=self._since_start_s, **event)
        record.time.GetCurrentTime()
        return train_pb.WatchRecordsResponse(log_id=self.log_id, number=self.number, job=self.job, record=record)

    def phase(self, name: str, step: int, rank: int = 0, deadline_s: float | None = 120.0, took_s: float = 0.0) -> Any:
        """A rank enters a section."""
        return self.record(rank, took_s, phase=record_pb.Phase(name=name, step=step, deadline_s=deadline_s))

    def progress(
        self,
        step: int,
        loss: float | None,
        *,
        norm: float | None = 1.0,
        step_time_s: float = 0.5,
        experts: ExpertLoad | None = None,
        loss_scale: float | None = None,
    ) -> train_pb.WatchRecordsResponse:
        """A step is done."""
        progress = record_pb.Progress(
            step=step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=3e-4,
            tokens=TOKENS_A_STEP,
            step_time_s=step_time_s,
            data_wait_s=step_time_s / 50,
            experts=None if experts is None else record_pb.ExpertLoad(**asdict(experts)),
            loss_scale=loss_scale,
        )
        return self.record(took_s=step_time_s, progress=progress)

    def heat(self, step: int, counts: npt.NDArray[np.int64]) -> train_pb.WatchRecordsResponse:
        """The load of every expert. counts [layers, E]: tokens."""
        return self.record(expert_heat=record_pb.ExpertHeat(step=step, **asdict(ExpertHeat.of(counts))))

    def saved(
        self, step: int, stall_s: float | None = 0.05, num_skipped: int = 0
    ) -> Iterator[train_pb.WatchRecordsResponse]:
        """A save was due: taken and committed, or left out where `stall_s` is None."""
        yield self.record(save=record_pb.Save(step=step, stall_s=stall_s, num_skipped=num_skipped))
        if stall_s is not None:
            yield self.record(committed=record_pb.Committed(attempt=self.attempt, step=step))
            yield self.event("committed", "running", attempt=self.attempt, step=step)

    def sign_of_life(self) -> train_pb.WatchRecordsResponse:
        """Nothing new."""
        return train_pb.WatchRecordsResponse(log_id=self.log_id, number=self.number)


def loss_at(step: int, noise: random.Random) -> float:
    """A loss that falls as losses do: 1.7 + 9 / step ** 0.5, with a little noise."""
    return 1.7 + 9.0 / math.sqrt(step) + noise.gauss(0.0, 0.02)


def started(told: Told, world_size: int = 4, attempt: int = 1, start_step: int = 0) -> Iterator[Any]:
    """An attempt begins: two nodes, its ranks in their first step."""
    told.attempt = attempt
    half = max(1, world_size // 2)
    placement = [
        train_pb.Assignment(node_id="node-a", ranks=range(half)),
        train_pb.Assignment(node_id="node-b", ranks=range(half, world_size)),
    ]
    yield told.event("starting", "starting", attempt=attempt, step=start_step, placement=placement)
    yield told.event("running", "running", attempt=attempt, placement=placement)
    for rank in range(world_size):
        yield told.record(rank, opened=record_pb.Opened(step=start_step))
        yield told.phase("first_step", start_step + 1, rank, 300.0)


STEP_PARTS = record_pb.StepParts(
    data_wait_s=0.01, forward_s=0.14, backward_s=0.26, communication_s=0.05, optimizer_s=0.02, rest_s=0.02
)


def steps(
    told: Told, first: int, last: int, *, world_size: int = 4, seed: int = 0, save_every: int = 100, slow: float = 1.0
) -> Iterator[Any]:
    """Steps with the records of all ranks, a checkpoint and an evaluation every `save_every`. slow: times of the last
    rank against the others'.
    """
    noise = random.Random(seed)
    for step in range(first, last + 1):
        for rank in range(world_size):
            busy_s = 0.45 * (slow if rank == world_size - 1 else 1.0) + noise.uniform(0, 0.01)
            step_time = record_pb.StepTime(step=step, step_time_s=0.5, busy_s=busy_s, parts=STEP_PARTS)
            yield told.record(rank, step_time=step_time)
            yield told.phase("step", step + 1, rank)
        yield told.progress(step, loss_at(step, noise), norm=noise.uniform(0.5, 1.5))
        if step % save_every == 0:
            yield told.record(committed=record_pb.Committed(attempt=told.attempt, step=step))
            yield told.event("committed", "running", attempt=told.attempt, step=step)
            yield told.record(evaluation=record_pb.Evaluation(step=step, loss=loss_at(step, noise) + 0.1))


def run_with_recovery(job: str, num_steps: int = 500, told: Told | None = None) -> Iterator[Any]:
    """A run whose first attempt loses a node at 60 %; the second one goes from the last checkpoint to the end."""
    told = told or Told(job)
    lost = num_steps * 6 // 10
    save_every = max(1, num_steps // 5)
    saved = lost // save_every * save_every
    yield told.event("submitted", "queued", actor="somebody")
    yield from started(told)
    yield from steps(told, 1, lost, save_every=save_every)
    yield told.record(non_finite=record_pb.NonFinite(step=lost + 1, loss="nan", gradient_norm="nan"))
    yield told.progress(lost + 1, None, norm=None)
    cause = record_pb.Cause(kind=record_pb.CAUSE_KIND_NODE_LOSS, message="node-b is not heard", node_id="node-b")
    yield told.event("recovering", "recovering", attempt=1, step=lost + 1, cause=cause, message="a new attempt")
    yield from started(told, attempt=2, start_step=saved)
    yield from steps(told, saved + 1, num_steps, save_every=save_every, seed=1, slow=2.0)


def tell_run(board: Board, told: Iterable[train_pb.WatchRecordsResponse]) -> None:
    """Feeds a board."""
    for each in told:
        board.observe(each)
