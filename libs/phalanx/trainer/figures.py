"""Turns the events of a run into rows for the sinks: one row a step, with the evaluation that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.planner.mfu import mfu_of
from phalanx.spec import Job
from phalanx.spec.job import plain
from phalanx.telemetry import Metric, Metrics
from phalanx.telemetry.sink import Sink

FIELDS = {
    Metric.LOSS: "loss",
    Metric.GRADIENT_NORM: "gradient_norm",
    Metric.LEARNING_RATE: "lr",
    Metric.STEP_TIME_S: "step_time_s",
    Metric.DATA_WAIT_S: "data_wait_s",
}


class Figures:
    """A context manager that takes events (kind and fields) of rank 0 and feeds the job's sinks, and `more` of them;
    what a sink does slows nobody.
    """

    def __init__(self, job: Job, more: Sequence[Sink] = ()) -> None:
        self._metrics = Metrics.of_run(
            Path(job.metrics.folder) / job.job.name,
            job.job.name,
            plain(job),
            project=job.job.project,
            enable_tensorboard=job.metrics.enable_tensorboard,
            enable_wandb=job.metrics.enable_wandb,
            more=more,
        )
        self._mfu = mfu_of(job)
        self._step = 0
        self._row: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Puts the last row and closes the sinks."""
        self._put()
        self._metrics.close()

    def observe(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A step's row is put when the next step begins, so that its evaluation is in it."""
        if kind == "progress":
            self._put()
            self._step = int(fields["step"])
            self._row = {
                metric: float("nan") if fields[name] is None else float(fields[name]) for metric, name in FIELDS.items()
            }
            tokens_per_s = fields["tokens"] / fields["step_time_s"]
            self._row[Metric.TOKENS_PER_SECOND] = tokens_per_s
            if self._mfu is not None:
                self._row[Metric.MFU] = self._mfu(tokens_per_s)
            if "replica_bytes_per_token" in fields:
                self._row[Metric.REPLICA_BYTES_PER_TOKEN] = float(fields["replica_bytes_per_token"])
            for name, value in fields.get("expert_load", {}).items():
                if value is not None:
                    self._row[f"{Metric.EXPERT_LOAD}/{name}"] = float(value)
            if "loss_scale" in fields:
                self._row[Metric.LOSS_SCALE] = float(fields["loss_scale"])
            for source, epochs in fields.get("epochs", {}).items():
                self._row[f"{Metric.EPOCHS}/{source}"] = float(epochs)
        elif kind == "evaluation" and int(fields["step"]) == self._step and fields["loss"] is not None:
            self._row[Metric.EVALUATION_LOSS] = float(fields["loss"])
            for name, value in fields.get("metrics", {}).items():
                if value is not None:
                    self._row[f"{Metric.EVALUATION}/{name}"] = float(value)
        elif kind == "opened":
            self._put()

    def _put(self) -> None:
        if self._row:
            self._metrics.log(self._step, self._row)
            self._row = {}
