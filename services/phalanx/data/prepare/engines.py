"""Who makes the chunks: this process, a pool of worker processes, or Spark. All give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.board import Board
from phalanx.data.prepare.making import Task, WorkOrder
from phalanx.data.prepare.pool import run_pool
from phalanx.objects import ObjectStore

ENGINES = ("local", "spark")


class Engine(Protocol):
    """Makes the chunks of all tasks that the board needs, in any order; returns once all are there.

    Raises what reading and writing raise, and OutsideError where workers died.
    """

    def make(self, order: WorkOrder, out: ObjectStore, tasks: Sequence[Task], board: Board) -> None: ...


class Local:
    """workers: processes on this machine. With one, or where there is one piece, this process does the work, on the
    tokenizer's own threads; so it does for `memory://`, whose objects no other process sees.
    """

    def __init__(self, workers: int = 1) -> None:
        if workers < 1:
            raise PhalanxError("--workers", value=workers, expected="1 or more", remedy="raise it or leave it out")
        self._workers = workers

    def make(self, order: WorkOrder, out: ObjectStore, tasks: Sequence[Task], board: Board) -> None:
        workers = min(self._workers, len(tasks))
        if workers > 1 and not out.url.startswith("memory://"):
            run_pool(order, tasks, board, workers)
            return
        maker = order.maker(out)
        for task in tasks:
            if board.is_needed(task.number):
                number = task.number
                board.finished(number, maker.make(task, lambda figures, number=number: board.working(number, figures)))  # type: ignore[misc]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine(name: str, workers: int | None, spark_master: str | None) -> Engine:
    """The engine that the command line names."""
    if name == "local":
        if spark_master is not None:
            raise PhalanxError(
                "--spark-master",
                value=spark_master,
                expected="--engine spark with it",
                remedy="add it or leave this out",
            )
        return Local(num_cores() if workers is None else workers)
    if name == "spark":
        from phalanx.data.prepare.spark import Spark

        if workers is not None:
            raise PhalanxError(
                "--workers", value=workers, expected="no such option with --engine spark", remedy="name --spark-master"
            )
        return Spark(spark_master)
    raise PhalanxError("--engine", value=name, expected=f"one of {', '.join(ENGINES)}", remedy="change it")
