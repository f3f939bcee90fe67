"""Loss, and the user's own metrics, on the held-out split: always the same windows, from the start of its order, in the
layout that trains.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from phalanx.parallel import ParallelModel
from phalanx.stream.windows import WindowReader
from phalanx.trainer.feed import BatchShape, read_slots


class Evaluator:
    """Evaluates `shape.global_batch_size` windows. All ranks call `measure` together."""

    def __init__(self, model: ParallelModel, reader: WindowReader, shape: BatchShape, device: torch.device) -> None:
        self._model, self._reader, self._shape, self._device = model, reader, shape, device

    def measure(self) -> tuple[float, dict[str, float]]:
        """The mean loss over the valid targets (cross-entropy in nats, where it is not the user's own), and the means
        of `metrics.fn` by name; one all-reduce.
        """
        batch, _ = read_slots(self._reader, 0, self._shape, self._device)
        valid_tokens = self._reader.valid_targets(np.arange(self._shape.global_batch_size, dtype=np.int64))
        found = self._model.measure(batch, max(1, valid_tokens)).double()
        dist.all_reduce(found)
        loss, *others = found.tolist()
        return loss, dict(zip(self._model.metrics, others, strict=True))

    def close(self) -> None:
        """Ends the reader's threads."""
        self._reader.close()
