"""Turns step numbers into the batches that this rank feeds its model, one step ahead in a thread, never past the plan's
horizon.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.lineage import LoaderState
from phalanx.parallel import SlotBatch
from phalanx.stream.batch import slots
from phalanx.stream.view import View
from phalanx.stream.windows import MixtureReader, WindowBatch
from phalanx.trainer.control import Plan
from phalanx.trainer.widen import to_device


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How the global batch falls onto this rank (design: the batch rule): sizes in windows, `multiple_of` in slots."""

    global_batch_size: int
    local_batch_size: int
    dp: int
    dp_rank: int
    multiple_of: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's input on this rank. valid_tokens: targets with a loss in the whole global batch."""

    batch: SlotBatch
    valid_tokens: int
    windows: WindowBatch


def read_slots(
    reader: MixtureReader, first_position: int, shape: BatchShape, device: torch.device
) -> tuple[SlotBatch, WindowBatch]:
    """This rank's slots of the global batch that starts at `first_position`, read and moved."""
    positions = slots_at(first_position, shape)
    windows = reader.read(positions.reshape(-1))
    return to_device(windows.packed, len(positions), device, has_documents=reader.document_mask), windows


def slots_at(first_position: int, shape: BatchShape) -> NDArray[np.int64]:
    """Window positions of this rank's slots, int64 [slots, local_batch_size]; -1 is surplus."""
    return slots(
        first_position,
        shape.global_batch_size,
        shape.dp,
        shape.local_batch_size,
        shape.dp_rank,
        multiple_of=shape.multiple_of,
    )


def advanced(start: LoaderState, step: int, global_batch_size: int) -> LoaderState:
    """Where a loader that stood at `start` stands after `step`."""
    return LoaderState(step, start.position + (step - start.step) * global_batch_size)


class Feed:
    """Batches in step order; the next one is read while the current one trains. start: where the attempt begins;
    view_of: what a plan says of positions.
    """

    def __init__(
        self,
        reader: MixtureReader,
        shape: BatchShape,
        device: torch.device,
        plan: Plan,
        start: LoaderState,
        view_of: Callable[[Plan], View],
    ) -> None:
        self._reader, self._shape, self._device, self._start = reader, shape, device, start
        self._view_of = view_of
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[Any]] = {}
        self._plan = plan
        self.view = view_of(plan)
        reader.follow(self.view)
        self._steps = _Steps(reader, self._positions, self._is_readable)

    def follow(self, plan: Plan) -> None:
        """Adopts a renewed plan; what was read ahead under another one is dropped and read again."""
        if not plan.reads_as(self._plan):
            self._drop_ahead()
            self.view = self._view_of(plan)
            self._reader.follow(self.view)
            self._steps = _Steps(self._reader, self._positions, self._is_readable)
        self._plan = plan

    def take(self, step: int) -> StepInput:
        """The input of `step`; raises what reading it raised. Starts reading the step after it, if the plan reaches so
        far.
        """
        assert step <= self._plan.horizon_step, f"step {step} lies past the horizon {self._plan.horizon_step}"
        future = self._ahead.pop(step, None) or self._pool.submit(self._read, step, self._steps)
        batch, windows, valid_tokens = future.result()
        if step + 1 not in self._ahead and self._is_readable(step + 1):
            self._ahead[step + 1] = self._pool.submit(self._read, step + 1, self._steps)
        return StepInput(batch, valid_tokens, windows)

    def _is_readable(self, step: int) -> bool:
        """Whether the plan reaches so far, and the data."""
        stop = self._first_position(step + 1)
        return step <= self._plan.horizon_step and (self.view.end is None or stop <= self.view.end)

    def _first_position(self, step: int) -> int:
        return advanced(self._start, step - 1, self._shape.global_batch_size).position

    def _positions(self, step: int) -> NDArray[np.int64]:
        return slots_at(self._first_position(step), self._shape).reshape(-1)

    def _read(self, step: int, steps: _Steps) -> tuple[SlotBatch, WindowBatch, int]:
        first, shape = self._first_position(step), self._shape
        windows = steps.take(step)
        num_slots = windows.packed.shape[0] // shape.local_batch_size
        batch = to_device(windows.packed, num_slots, self._device, has_documents=self._reader.document_mask)
        valid = self._reader.valid_targets(np.arange(first, first + shape.global_batch_size, dtype=np.int64))
        return batch, windows, valid

    def _drop_ahead(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Waits for a read in flight and ends the threads, the reader's too."""
        self._drop_ahead()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


class _Steps:
    """The windows of step after step under one view, read for several steps at once where the plan allows. Whoever
    adopts another view makes a new one: a read in flight goes on with the old one, and is dropped.
    """

    def __init__(
        self,
        reader: MixtureReader,
        positions: Callable[[int], NDArray[np.int64]],
        is_readable: Callable[[int], bool],
    ) -> None:
        self._reader, self._positions, self._is_readable = reader, positions, is_readable
        self._next = 0
        self._batches: Iterator[WindowBatch] = iter(())

    def take(self, step: int) -> WindowBatch:
        """The windows of `step`; raises what reading them raised, and then reads them anew when asked again."""
        batch = next(self._batches, None) if step == self._next else None
        if batch is None:
            further = itertools.takewhile(self._is_readable, itertools.count(step + 1))
            self._batches = self._reader.batches(map(self._positions, itertools.chain((step,), further)))
            batch = next(self._batches)
        self._next = step + 1
        return batch
