"""Collects step records between two checkpoints; they are stored before the checkpoint that covers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.core.expert_load import ExpertLoad
from phalanx.core.step_parts import Part, StepParts
from phalanx.lineage import Lineage, ObjectRef, StepRows, WindowRows
from phalanx.objects import ObjectStore
from phalanx.stream.windows import ReadRows


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, the same on every rank but for the times. step_time_s: seconds from its begin to its end.
    parts: of its wall time. replica_bytes: what all ranks handed to collectives over `dp_replicate`, where the trainer
    itself calls them. experts: on the rank that records steps, of a model that has any. loss_scale: by which float16
    multiplied the loss; None with other types.
    """

    step: int
    loss: float
    gradient_norm: float
    valid_tokens: int
    step_time_s: float
    parts: StepParts
    replica_bytes: int = 0
    experts: ExpertLoad | None = None
    loss_scale: float | None = None


class Recorder:
    """Rows of the steps since the last checkpoint.

    records_windows: one rank of each data-parallel rank writes down what it read. records_steps: one rank of the gang
    writes the steps.
    """

    def __init__(
        self, lineage: Lineage, attempt: int, rank: int, start_step: int, *, records_windows: bool, records_steps: bool
    ) -> None:
        self._lineage, self._attempt, self._rank = lineage, attempt, rank
        self._records_windows, self._records_steps = records_windows, records_steps
        self._last_step = start_step
        self._windows: list[WindowRows] = []
        self._steps: list[StepResult] = []

    @property
    def records_steps(self) -> bool:
        """Whether this is the rank that writes down the steps."""
        return self._records_steps

    def add(self, result: StepResult, read: ReadRows) -> None:
        """Takes the rows of the step that comes after the last one taken."""
        if self._records_windows:
            step = np.full(len(read.position), result.step, dtype=np.int64)
            columns = {name: getattr(read, name) for name in ReadRows.__dataclass_fields__}
            self._windows.append(WindowRows(step=step, **columns))
        if self._records_steps:
            self._steps.append(result)

    def hand_over(self, last_step: int) -> Callable[[], tuple[ObjectRef, ...]]:
        """Starts anew behind `last_step`; returns what stores the rows up to it, off the training thread."""
        first_step, self._last_step = self._last_step + 1, last_step
        windows, self._windows = self._windows, []
        steps, self._steps = self._steps, []
        store = self._storing(first_step, last_step, windows, steps)
        return lambda: store(self._lineage)

    def copied(self, last_step: int) -> Callable[[ObjectStore], tuple[ObjectRef, ...]]:
        """What stores the rows since the last hand-over, which stay here too, in another store of the job."""
        store = self._storing(self._last_step + 1, last_step, list(self._windows), list(self._steps))
        return lambda target: store(Lineage(target))

    def _storing(
        self, first_step: int, last_step: int, windows: list[WindowRows], steps: list[StepResult]
    ) -> Callable[[Lineage], tuple[ObjectRef, ...]]:
        def store(lineage: Lineage) -> tuple[ObjectRef, ...]:
            if not (self._records_windows or self._records_steps) or first_step > last_step:
                return ()
            rows = WindowRows.concatenate(windows), _step_rows(steps)
            return (lineage.records.put(self._attempt, self._rank, first_step, last_step, *rows),)

        return store


def _step_rows(results: list[StepResult]) -> StepRows:
    """The results as columns."""
    loads = [result.experts for result in results]
    return StepRows(
        step=np.array([result.step for result in results], dtype=np.int64),
        loss=np.array([result.loss for result in results], dtype=np.float64),
        gradient_norm=np.array([result.gradient_norm for result in results], dtype=np.float64),
        valid_tokens=np.array([result.valid_tokens for result in results], dtype=np.int64),
        step_time_s=np.array([result.step_time_s for result in results], dtype=np.float64),
        **{
            part.value: np.array([getattr(result.parts, part) for result in results], dtype=np.float64) for part in Part
        },
        replica_bytes=np.array([result.replica_bytes for result in results], dtype=np.int64),
        expert_worst=_figures(load.worst if load else None for load in loads),
        expert_mean=_figures(load.mean if load else None for load in loads),
        expert_idle=_figures(load.idle if load else None for load in loads),
        balance_loss=_figures(load.balance_loss if load else None for load in loads),
        loss_scale=_figures(result.loss_scale for result in results),
    )


def _figures(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    """A column; NaN stands for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
