"""Answers rows of published measurements, without their answers, by the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.planner.stack_memory import largest_memory
from phalanx.planner.states import state_bytes
from phalanx.planner.time import step_time, tokens_per_s_per_gpu

from .agreement import check_counts
from .fields import Row, checked
from .rows import Read, read_row

GIB = 2**30


def predict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One answer a row, in order; a row that cannot be answered has `error`, one line, in place of figures.

    step_time_s: seconds. memory_gb: peak of the fullest GPU in GiB, as tools print it. model_states_gb: weights,
    gradients and optimizer of it, 10^9 bytes, as papers print it. bubble_rate: share of the pipeline's time.
    """
    times = Counter(str(row["id"]) for row in rows)
    return [_answer(row, times[str(row["id"])]) for row in rows]


def _answer(row: Row, times: int) -> dict[str, Any]:
    """The answer of a row whose id stands on so many rows."""
    twice = [f"id stands on {times} rows: answers are in the order of the rows"] if times > 1 else []
    try:
        read = read_row(row)
        check_counts(read, row)
        return {"id": row["id"], **figures(read, row), "assumptions": read.assumptions + twice}
    except PhalanxError as wrong:
        return {"id": row["id"], "error": str(wrong)}


def figures(read: Read, row: Row) -> dict[str, Any]:
    """The figures of one row."""
    config = read.config
    step = step_time(config)
    held = largest_memory(config.model, config.layout, config.run, config.software)
    capacity = read.memory_gib * GIB if read.memory_gib else config.cluster.gpu.memory_bytes
    total_bytes = held.total_bytes
    if read.spills:
        total_bytes = min(total_bytes, max(capacity, total_bytes - held.activations_bytes))
    in_pipeline = step.total_s - step.data_s - step.optimizer_s - step.other_s
    return {
        "step_time_s": round(step.total_s, 5),
        "tokens_per_s_per_gpu": round(tokens_per_s_per_gpu(config, step), 2),
        "memory_gb": round(total_bytes / GIB, 2),
        "fits": total_bytes <= capacity,
        "model_states_gb": round(_states_gb(read, row, held.states.total), 2),
        "bubble_rate": round(step.bubble_s / in_pipeline, 4),
    }


def _states_gb(read: Read, row: Row, counted: float) -> float:
    """Of the counted shape; by the printed number of parameters where no shape is given."""
    model: Mapping[str, Any] = checked(row, [])["model"]
    if model.get("hidden") or not model.get("params"):
        return counted / 1e9
    layout = read.config.layout
    held = float(model["params"]) / layout.tp / layout.pp
    return state_bytes(held, layout.dp * layout.cp, read.config.run.zero).total / 1e9
