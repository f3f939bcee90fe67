"""Ranks that are slow on purpose in chosen parts of a step, for tests of where its time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.gang.context import RankContext

DATA_S, OPTIMIZER_S, CHECKPOINT_S, EVALUATION_S = 0.11, 0.13, 0.17, 0.19


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """`function`, which takes so much longer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return call


def run(context: RankContext) -> None:
    """A rank of a job; tells as `measured` the seconds from its first step's begin to its last one's end."""
    from phalanx.parallel.clock import StepClock
    from phalanx.trainer.evaluator import Evaluator
    from phalanx.trainer.feed import Feed
    from phalanx.trainer.optimizer import Optimizer
    from phalanx.trainer.rank import run_rank
    from phalanx.trainer.saver import Saver

    Feed.take = slowed(Feed.take, DATA_S)  # type: ignore[method-assign]
    Optimizer.update = slowed(Optimizer.update, OPTIMIZER_S)  # type: ignore[method-assign]
    Saver.save = slowed(Saver.save, CHECKPOINT_S)  # type: ignore[method-assign]
    Evaluator.measure = slowed(Evaluator.measure, EVALUATION_S)  # type: ignore[method-assign]
    started, ended, moments = StepClock.start, StepClock.end_step, list[float]()

    def start(clock: StepClock) -> None:
        moments.append(time.perf_counter())
        started(clock)

    def end_step(clock: StepClock) -> Any:
        parts = ended(clock)
        moments.append(time.perf_counter())
        return parts

    StepClock.start, StepClock.end_step = start, end_step  # type: ignore[method-assign]
    run_rank(context)
    context.report("measured", wall_s=moments[-1] - moments[0])
