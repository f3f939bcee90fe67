"""A pool of worker processes on this machine: each has one piece at a time, and the pieces go out in order.

A worker that dies is replaced and its piece made again, once; a second death on one piece ends the preparation with an
error that names the piece. Workers never outlive the pool: it kills them on its way out, and they end by themselves
when their standard input does, so a kill of this process leaves nobody behind.
"""

from __future__ import annotations

import json
import os
import selectors
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare import processes
from phalanx.data.prepare.board import Board
from phalanx.data.prepare.making import Task, WorkOrder
from phalanx.data.prepare.progress import Figures

_DEATHS_ALLOWED = 1  # on one piece
_SHOW_S = 0.5


class WorkerFailed(Exception):
    """A bug in a worker; the message is its traceback."""


def run_pool(order: WorkOrder, tasks: Sequence[Task], board: Board, workers: int) -> None:
    """Makes the chunks of all tasks that are needed on `workers` processes.

    Raises what a worker's input and store raise (as PhalanxError or OutsideError), OutsideError where workers die, and
    WorkerFailed.
    """
    with _Pool(order, tasks, board, workers) as pool:
        pool.run()


class _Worker:
    """One process: its task, and the bytes of an answer that is not whole yet."""

    def __init__(self, order: WorkOrder) -> None:
        # one core each: the processes share the machine, the tokenizer's threads would compete
        threads = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = processes.start("phalanx.data.prepare.worker", threads)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self.output = self.process.stdin, self.process.stdout
        self.task: Task | None = None
        self._unread = b""
        self.send(order.to_json())

    def send(self, line: str) -> None:
        """Sends a line; a worker that is dead by now is found by the end of its output."""
        with suppress(BrokenPipeError):
            self._input.write(line.encode() + b"\n")
            self._input.flush()

    def answers(self) -> list[dict[str, Any]] | None:
        """The answers that came, or None at the end of the output."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


class _Pool:
    def __init__(self, order: WorkOrder, tasks: Sequence[Task], board: Board, workers: int) -> None:
        self._order, self._board = order, board
        self._waiting = deque(tasks)
        self._deaths: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._wanted = workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.process.kill()  # all of them before waiting for the first
        for worker in self._workers:
            processes.end(worker.process)
        self._selector.close()

    def run(self) -> None:
        """Until no task is left."""
        for _ in range(self._wanted):
            self._start()
        while self._workers:
            for key, _ in self._selector.select(_SHOW_S):
                worker: _Worker = key.data
                answers = worker.answers()
                if answers is None:
                    self._bury(worker)
                    continue
                for answer in answers:
                    self._take(worker, answer)
            self._board.show()

    def _start(self) -> None:
        worker = _Worker(self._order)
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _take(self, worker: _Worker, answer: dict[str, Any]) -> None:
        match answer["kind"]:
            case "ready":
                self._next(worker)
            case "working":
                assert worker.task is not None
                self._board.working(worker.task.number, Figures(**answer["figures"]))
            case "finished":
                assert worker.task is not None
                self._board.finished(worker.task.number, Figures(**answer["figures"]))
                self._next(worker)
            case "refused":
                where, value = answer["where"], answer["value"]
                raise PhalanxError(where, value=value, expected=answer["expected"], remedy=answer["remedy"])
            case "outside":
                raise OutsideError(answer["message"])
            case _:
                raise WorkerFailed(answer["traceback"])

    def _next(self, worker: _Worker) -> None:
        """The worker's next task, or its end where none is left."""
        worker.task = None
        while self._waiting and not self._board.is_needed(self._waiting[0].number):
            self._waiting.popleft()
        if self._waiting:
            worker.task = self._waiting.popleft()
            worker.send(worker.task.to_json())
        else:
            self._remove(worker)

    def _remove(self, worker: _Worker) -> int:
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        return processes.end(worker.process)

    def _bury(self, worker: _Worker) -> None:
        """A worker died: its piece goes to a fresh one, once."""
        task, code = worker.task, self._remove(worker)
        number = -1 if task is None else task.number
        self._deaths[number] = self._deaths.get(number, 0) + 1
        if self._deaths[number] > _DEATHS_ALLOWED:
            how = processes.how_it_ended(code, "fewer --workers need less")
            doing = "started" if task is None else f"made piece {number + 1} ({task.piece.spans[0].path})"
            raise OutsideError(f"a worker process died while it {doing}, and so did the one after it: {how}")
        if task is not None:
            self._board.lost(number)
            self._waiting.appendleft(task)
        self._start()
