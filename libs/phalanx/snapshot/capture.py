"""Copies live tensors into a host buffer that is kept from save to save: the only part of a save for which training
waits.

One buffer, not two: host memory of once the owned bytes is the price that most machines can pay, and a second save that
begins while the first is being written would compete with it for the same disk or network. So a save waits for the one
in flight; the trainer's policy (`checkpoint.when_busy`) says whether it begins one then. The buffer is page-locked
where a tensor lies on an accelerator, so that copies run at the speed of the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.core.box import Box
from phalanx.snapshot.grouping import PlannedObject, buffer_bytes


class HostBuffer:
    """Reusable host memory; it grows to the largest save seen and is never shared by two saves."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def capture(self, objects: Sequence[PlannedObject], sources: Sequence[torch.Tensor]) -> memoryview:
        """Copies `sources[box.index]` (a tensor of the box's shape) of every planned box; every byte is copied at
        return.

        Returns the buffer's memory; object `o`'s data lies at [o.buffer_start, o.buffer_start + o.data_bytes). Valid
        until the next call.
        """
        accelerators = {source.device for source in sources if source.device.type != "cpu"}
        self._reserve(buffer_bytes(objects), pinned=bool(accelerators))
        with torch.no_grad():
            for planned in objects:
                for box, start in planned.boxes:
                    self._copy(planned.buffer_start + start, sources[box.index])
        for device in accelerators:
            torch.accelerator.synchronize(device)
        return self._bytes.numpy().data

    def _reserve(self, num_bytes: int, *, pinned: bool) -> None:
        if self._bytes.numel() < num_bytes or (pinned and not self._bytes.is_pinned()):
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _copy(self, start: int, source: torch.Tensor) -> None:
        stop = start + source.numel() * source.element_size()
        target = self._bytes[start:stop].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)


def cut(local: torch.Tensor, held: Box, wanted: Box) -> torch.Tensor:
    """The view of `local`, which holds the box `held`, that is the box `wanted` (global indices)."""
    return local.detach()[held.slices_of(wanted)] if held.shape else local.detach()
