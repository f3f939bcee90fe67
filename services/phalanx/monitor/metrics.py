"""The monitor's figures for Prometheus, read from what it holds when they are asked for.

A job is a label of some series: only the `MAX_LABELLED_JOBS` runs heard last have any, so that a cluster that has run
for years shows no more series than one of yesterday. GPUs are bounded by the machines; kinds of incidents by their
number; a job's own metrics by what its file may have (`MAX_METRICS`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.monitor.board import Board
from phalanx.monitor.gpus import GpuBoard
from phalanx.monitor.messages import saves_message
from phalanx.monitor.run import Run

MAX_LABELLED_JOBS = 100
MAX_LABELLED_GPUS = 20_000
Count = Callable[[], float]


def _saves(run: Run, figure: Literal["age_s", "num_bytes", "stall_s"]) -> float | None:
    saves = saves_message(run.attempts, time.time_ns())
    return float(getattr(saves, figure)) if saves is not None and saves.HasField(figure) else None


def _load(run: Run, figure: Literal["worst", "mean", "idle", "balance_loss"]) -> float | None:
    experts = run.summary.experts
    return None if experts is None else getattr(experts, figure)


def _own_metrics(run: Run) -> Mapping[str, float]:
    """The job's own, of its last evaluation."""
    return run.evaluations[max(run.evaluations)].metrics if run.evaluations else {}


def _skipped(run: Run) -> float:
    return float(sum(facts.num_skipped for facts in run.attempts.values()))


_RUN_GAUGES: tuple[tuple[str, str, Callable[[Run], float | None]], ...] = (
    ("loss", "Loss of the last step", lambda run: run.summary.loss),
    ("step", "The last step", lambda run: run.summary.step),
    ("steps_planned", "Steps of the job", lambda run: run.summary.num_steps or None),
    ("tokens_per_second", "Tokens a second over the last steps", lambda run: run.summary.tokens_per_second),
    ("step_time_seconds", "Time of the last step", lambda run: run.summary.step_time_s),
    ("attempt", "The newest attempt", lambda run: run.summary.attempt),
    (
        "expert_worst",
        "Tokens of the busiest expert over its layer's mean, worst layer",
        lambda run: _load(run, "worst"),
    ),
    ("expert_mean", "The same in the mean over the layers", lambda run: _load(run, "mean")),
    ("expert_idle", "Share of experts without a token, 0 to 1", lambda run: _load(run, "idle")),
    ("balance_loss", "What the loss of balance added to what was minimised", lambda run: _load(run, "balance_loss")),
    ("loss_scale", "By how much float16 multiplied the loss", lambda run: run.summary.loss_scale),
    ("running", "1 while its ranks train", lambda run: run.summary.state == train_pb.JOB_STATE_RUNNING),
    ("checkpoint_age_seconds", "Time since the last commit", lambda run: _saves(run, "age_s")),
    ("checkpoint_bytes", "Tensor data of the last checkpoint", lambda run: _saves(run, "num_bytes")),
    ("save_stall_seconds", "Time for which the last save held training up", lambda run: _saves(run, "stall_s")),
    ("saves_skipped", "Saves left out, as the one before was still on its way", _skipped),
    ("silent_seconds", "Time since it was last heard of", lambda run: time.monotonic() - run.summary.heard_s),
)
_GPU_GAUGES = (
    ("utilization", "Use, 0 to 1"),
    ("memory_used_bytes", "Memory in use"),
    ("memory_total_bytes", "Memory"),
    ("temperature_c", "Temperature, degrees Celsius"),
    ("power_w", "Power, watts"),
    ("sm_clock_mhz", "Clock of the streaming multiprocessors"),
    ("xid", "The last XID error, 0 for none"),
    ("ecc_uncorrectable", "Uncorrectable memory errors since the driver was loaded"),
)


class MonitorCollector(Collector):
    """Figures of runs, incidents, GPUs and of the monitor's own work. counts: counters by name, with a word each."""

    def __init__(self, board: Board, gpus: GpuBoard, counts: dict[str, tuple[str, Count]]) -> None:
        self._board, self._gpus, self._counts = board, gpus, counts

    def collect(self) -> Iterator[Metric]:
        """All series."""
        yield from self._runs()
        yield from self._gpu_series()
        yield from self._sources()
        for name, (words, count) in self._counts.items():
            yield _counter(name, words, [], [((), count())])

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the runs."""
        return ()

    def _runs(self) -> Iterator[Metric]:
        figures, incidents, own = self._board.read_newest(MAX_LABELLED_JOBS, _figures)
        for index, (name, words, _) in enumerate(_RUN_GAUGES):
            rows = [((job,), values[index]) for job, values in figures.items()]
            yield _gauge(f"phalanx_run_{name}", words, ["job"], rows)
        words = "What the job's own functions (metrics.fn) gave at the last evaluation"
        yield _gauge("phalanx_run_evaluation_metric", words, ["job", "metric"], own.items())
        counted = [((job, kind), number) for (job, kind), number in incidents.items()]
        yield _counter("phalanx_run_incidents", "Incidents", ["job", "kind"], counted)

    def _gpu_series(self) -> Iterator[Metric]:
        labels = ["node", "gpu", "uuid", "instance"]
        readings = self._gpus.readings()[:MAX_LABELLED_GPUS]
        for figure, words in _GPU_GAUGES:
            rows = [((at.node, str(at.index), at.uuid, at.gpu_instance), getattr(at, figure)) for at, _ in readings]
            yield _gauge(f"phalanx_gpu_{figure}", words, labels, rows)

    def _sources(self) -> Iterator[Metric]:
        states = self._gpus.sources()
        up = [((name,), float(state.is_up)) for name, state in states.items()]
        yield _gauge("phalanx_monitor_source_up", "1 while a source of GPU figures answers", ["source"], up)
        for name, words, counts in (
            ("scrape_failures", "Scrapes of GPUs that failed", self._gpus.failures()),
            ("scrape_bad_lines", "Lines of exporters that could not be read", self._gpus.bad_lines()),
        ):
            rows = [((source,), float(number)) for source, number in counts.items()]
            yield _counter(f"phalanx_monitor_{name}", words, ["source"], rows)


def _figures(
    runs: Iterable[Run],
) -> tuple[dict[str, list[float | None]], Counter[tuple[str, str]], dict[tuple[str, ...], float | None]]:
    figures: dict[str, list[float | None]] = {}
    incidents: Counter[tuple[str, str]] = Counter()
    own: dict[tuple[str, ...], float | None] = {}
    for run in runs:
        figures[run.job] = [read(run) for _, _, read in _RUN_GAUGES]
        incidents.update((run.job, incident.kind) for incident, _ in run.incidents.values())
        own.update({(run.job, name): value for name, value in _own_metrics(run).items()})
    return figures, incidents, own


Series = Iterable[tuple[tuple[str, ...], float | None]]


def _gauge(name: str, words: str, labels: list[str], rows: Series) -> Metric:
    return _with(GaugeMetricFamily(name, words, labels=labels), rows)


def _counter(name: str, words: str, labels: list[str], rows: Series) -> Metric:
    return _with(CounterMetricFamily(name, words, labels=labels), rows)


def _with(family: GaugeMetricFamily | CounterMetricFamily, rows: Series) -> Metric:
    for labels, value in rows:
        if value is not None:
            family.add_metric(list(labels), float(value) if not math.isnan(value) else math.nan)
    return family
