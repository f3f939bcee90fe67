"""Answers about runs: what the service and the page tell. Reads the board under its lock, builds messages outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.monitor.board import Board
from phalanx.monitor.curve import Rows, thinned
from phalanx.monitor.gpus import GpuBoard
from phalanx.monitor.messages import (
    attempt_messages,
    curve_message,
    evaluation_messages,
    gpu_message,
    incident_message,
    rank_messages,
    source_words,
    summary_message,
)
from phalanx.monitor.run import Run
from phalanx.monitor.store import MonitorStore

MAX_POINTS_AN_ANSWER = 400_000  # 60 to 80 bytes each: below the limit of a message
MAX_POINTS_A_CHANGE = 20_000
LEAST_PAUSE_S, PAUSE_A_RANK_S, SIGN_OF_LIFE_S = 0.25, 0.25e-3, 5.0
_LOOK_S = 1.0


class View:
    """Safe for several threads."""

    def __init__(self, board: Board, gpus: GpuBoard, store: MonitorStore) -> None:
        self._board, self._gpus, self._store = board, gpus, store

    def list_runs(self) -> pb.ListRunsResponse:
        """The runs, newest first."""
        return pb.ListRunsResponse(runs=self._board.read_all(summary_message))

    def get_run(self, job: str, max_points: int = 0, after_step: int = 0) -> pb.GetRunResponse:
        """A run; raises NotFound. max_points: 0 for all, of which `MAX_POINTS_AN_ANSWER` fit one answer, the first ones
        behind `after_step`.
        """
        with self._board.reading(job) as run:
            answer = pb.GetRunResponse(
                summary=summary_message(run),
                evaluations=evaluation_messages(run, after_step=after_step),
                ranks=rank_messages(run.ranks.views(self._board.clock.now_s)),
                incidents=[incident_message(incident) for incident, _ in run.incidents.values()],
                events=[event for _, (event, _) in sorted(run.events.items())],
                attempts=attempt_messages(run),
                version=run.version,
                num_missed_records=run.num_missed,
                expert_heat=run.heat,
            )
            rows = run.curve.behind(after_step)
            rows = thinned(rows, max_points) if max_points else rows[:MAX_POINTS_AN_ANSWER]
            rows = rows[:MAX_POINTS_AN_ANSWER].copy()
        answer.curve.CopyFrom(curve_message(rows))
        return answer

    def watch_run(
        self, job: str, after_version: int = 0, ended: threading.Event | None = None
    ) -> Iterator[pb.WatchRunResponse]:
        """What is new about a run, until closed or `ended`; a summary with the ranks at least every `SIGN_OF_LIFE_S`.

        A version of another process of the monitor, or one too old, gets everything, its curve thinned.
        """
        ended = ended or threading.Event()
        version, told_s = after_version, -SIGN_OF_LIFE_S
        while not ended.is_set():
            change = self._change(job, version)
            if change is None and time.monotonic() - told_s >= SIGN_OF_LIFE_S:
                change = self._sign_of_life(job)
            if change is not None:
                yield change
                version, told_s = change.version, time.monotonic()
                ended.wait(LEAST_PAUSE_S + len(change.ranks) * PAUSE_A_RANK_S)
            else:
                self._board.wait(job, version, _LOOK_S)

    def list_incidents(self, job: str = "") -> pb.ListIncidentsResponse:
        """The incidents of a job, or all, oldest first."""
        return pb.ListIncidentsResponse(incidents=map(incident_message, self._store.incidents(job)))

    def list_gpus(self) -> pb.ListGpusResponse:
        """The GPUs with their last readings."""
        gpus = [gpu_message(*each) for each in self._gpus.readings()]
        return pb.ListGpusResponse(gpus=gpus, sources=source_words(self._gpus.sources()))

    def _change(self, job: str, version: int) -> pb.WatchRunResponse | None:
        """What came after the version; None for nothing."""
        with self._board.reading(job) as run:
            if version == run.version:
                return None
            after = version if run.has_version(version) else -1
            answer = pb.WatchRunResponse(
                summary=summary_message(run),
                evaluations=evaluation_messages(run, after),
                ranks=rank_messages(run.ranks.views(self._board.clock.now_s)),
                incidents=[incident_message(incident) for incident, at in run.incidents.values() if at > after],
                events=[event for _, (event, at) in sorted(run.events.items()) if at > after],
                attempts=attempt_messages(run) if run.attempts_version > after else (),
                version=run.version,
                expert_heat=run.heat if run.heat_version > after else None,
            )
            rows = _changed_rows(run, after)
        if rows is not None:
            answer.curve.CopyFrom(curve_message(rows))
        return answer

    def _sign_of_life(self, job: str) -> pb.WatchRunResponse:
        with self._board.reading(job) as run:
            return pb.WatchRunResponse(
                summary=summary_message(run),
                ranks=rank_messages(run.ranks.views(self._board.clock.now_s)),
                version=run.version,
            )


def _changed_rows(run: Run, after_version: int) -> Rows | None:
    first = 1 if after_version < 0 else run.changed_from(after_version)
    return None if first is None else thinned(run.curve.behind(first - 1), MAX_POINTS_A_CHANGE).copy()
