"""What the trainer holds: all sinks of a run behind their queues."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.telemetry.queue import Counts, SinkQueue
from phalanx.telemetry.sink import Sink, Values


class Metrics:
    """Give figures to every sink; a context manager that closes them within `close_deadline_s` seconds together."""

    def __init__(
        self, sinks: Sequence[Sink], run_id: str, config: Mapping[str, Any], *, close_deadline_s: float = 30.0
    ) -> None:
        self._queues = {sink.name: SinkQueue(sink, run_id, config) for sink in sinks}
        self._close_deadline_s = close_deadline_s

    @staticmethod
    def of_run(
        folder: Path,
        run_id: str,
        config: Mapping[str, Any],
        *,
        project: str = "phalanx",
        enable_tensorboard: bool = False,
        enable_wandb: bool = False,
        more: Sequence[Sink] = (),
    ) -> Metrics:
        """The sinks that a job file's [metrics] enables, in `folder`; `metrics.jsonl` always.

        run_id: the job's id, under which a later start of the same job continues. config: plain values to show beside
        the run. more: sinks beside those. Raises PhalanxError, naming the extra, when a library is missing.
        """
        from phalanx.telemetry.jsonl import JsonLines

        sinks: list[Sink] = [JsonLines(folder), *more]
        if enable_tensorboard:
            from phalanx.telemetry.tensorboard import TensorBoard

            sinks.append(TensorBoard(folder))
        if enable_wandb:
            from phalanx.telemetry.wandb import WeightsAndBiases

            sinks.append(WeightsAndBiases(folder, project))
        return Metrics(sinks, run_id, config)

    def log(self, step: int, values: Values) -> None:
        """One row of figures for step `step`; never waits. A step at or below a sink's newest is not logged there
        again.
        """
        for queue in self._queues.values():
            queue.put(step, values)

    def flush(self, deadline_s: float) -> bool:
        """Whether everything logged so far is where readers see it, in every sink, within the deadline."""
        end_s = time.monotonic() + deadline_s
        flushed = [queue.flush(max(0.0, end_s - time.monotonic())) for queue in self._queues.values()]
        return all(flushed)

    def close(self) -> dict[str, Counts]:
        """Close every sink; the fate of its rows by the sink's name."""
        end_s = time.monotonic() + self._close_deadline_s
        return {name: queue.close(max(0.0, end_s - time.monotonic())) for name, queue in self._queues.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
