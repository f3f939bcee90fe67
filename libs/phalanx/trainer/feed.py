"""Turns step numbers into the batches that this rank feeds its model, one step ahead in a thread, never past the plan's
horizon.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phalanx.lineage import LoaderState
from phalanx.parallel import SlotBatch
from phalanx.stream.batch import slots
from phalanx.stream.windows import WindowBatch, WindowReader
from phalanx.trainer.control import Plan


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
    """One step's input on this rank. valid_tokens: targets with a loss in the whole global batch. wait_s: how long the
    step waited.
    """

    batch: SlotBatch
    valid_tokens: int
    windows: WindowBatch
    wait_s: float


def to_device(windows: WindowBatch, num_slots: int, device: torch.device) -> SlotBatch:
    """The windows as int64 tensors [num_slots * local_batch_size, seq_len] on `device`; for a GPU by way of page-locked
    memory, without which a copy would wait for what the GPU has still to do.
    """

    def move(array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

    return SlotBatch(
        tokens=move(windows.tokens),
        targets=move(windows.targets),
        position_ids=move(windows.position_ids),
        document_ids=move(windows.document_ids),
        num_slots=num_slots,
    )


def read_slots(
    reader: WindowReader, first_position: int, shape: BatchShape, device: torch.device
) -> tuple[SlotBatch, WindowBatch]:
    """This rank's slots of the global batch that starts at `first_position`, read and moved."""
    positions = slots(
        first_position,
        shape.global_batch_size,
        shape.dp,
        shape.local_batch_size,
        shape.dp_rank,
        multiple_of=shape.multiple_of,
    )
    windows = reader.read(positions.reshape(-1))
    return to_device(windows, len(positions), device), windows


def advanced(start: LoaderState, step: int, global_batch_size: int) -> LoaderState:
    """Where a loader that stood at `start` stands after `step`."""
    return LoaderState(step, start.position + (step - start.step) * global_batch_size)


class Feed:
    """Batches in step order; the next one is read while the current one trains. start: where the attempt begins."""

    def __init__(
        self, reader: WindowReader, shape: BatchShape, device: torch.device, plan: Plan, start: LoaderState
    ) -> None:
        self._reader, self._shape, self._device, self._start = reader, shape, device, start
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[Any]] = {}
        self._plan = plan
        reader.set_zero_weight(plan.zero_weight)

    def follow(self, plan: Plan) -> None:
        """Adopts a renewed plan; what was read ahead under other weights is dropped and read again."""
        if plan.zero_weight != self._plan.zero_weight:
            self._drop_ahead()
            self._reader.set_zero_weight(plan.zero_weight)
        self._plan = plan

    def take(self, step: int) -> StepInput:
        """The input of `step`; raises what reading it raised. Starts reading the step after it, if the plan reaches so
        far.
        """
        assert step <= self._plan.horizon_step, f"step {step} lies past the horizon {self._plan.horizon_step}"
        started = time.perf_counter()
        future = self._ahead.pop(step, None) or self._pool.submit(self._read, step)
        batch, windows, valid_tokens = future.result()
        wait_s = time.perf_counter() - started
        if step < self._plan.horizon_step and step + 1 not in self._ahead:
            self._ahead[step + 1] = self._pool.submit(self._read, step + 1)
        return StepInput(batch, valid_tokens, windows, wait_s)

    def _read(self, step: int) -> tuple[SlotBatch, WindowBatch, int]:
        first = advanced(self._start, step - 1, self._shape.global_batch_size).position
        batch, windows = read_slots(self._reader, first, self._shape, self._device)
        valid = self._reader.valid_targets(np.arange(first, first + self._shape.global_batch_size, dtype=np.int64))
        return batch, windows, valid

    def _drop_ahead(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Waits for a read in flight and ends the thread."""
        self._drop_ahead()
        self._pool.shutdown(wait=True, cancel_futures=True)
