"""Copies live tensors into a host buffer that is kept from save to save: the only part of a save for which training
may have to wait.

The copy runs in a thread beside whatever only reads the tensors (a forward and backward pass), on an accelerator on a
stream of its own; whoever is about to change them waits for it first. One buffer, not two: host memory of once the
owned bytes is the price that most machines can pay, and a second save that begins while the first is being written
would compete with it for the same disk or network. So a save waits for the one in flight; the trainer's policy
(`checkpoint.when_busy`) says whether it begins one then. The buffer is page-locked where a tensor lies on an
accelerator, so that copies run at the speed of the bus; else it asks for huge pages, and can be touched beforehand, as
the first touch of memory costs more than the copy.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from phalanx.core.box import Box, HeldTensor
from phalanx.snapshot import background
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.grouping import OwnedBox, PlannedObject, buffer_bytes
from phalanx.snapshot.owners import owned_box

_TOUCH_BYTES = 32 << 20
_COPY_BYTES = 8 << 20
_MAX_COPIERS = 4  # a few cores take all of the memory's bandwidth


class HostBuffer:
    """Reusable host memory; it grows to the largest save seen and is never shared by two saves. mapped: gets memory of
    a size that is never page-locked; None: where it pays, memory is.
    """

    def __init__(self, mapped: Callable[[int], torch.Tensor] | None = None) -> None:
        self._own_mapped = mapped
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def prepare(self, objects: Sequence[PlannedObject], sources: Sequence[torch.Tensor]) -> Future[None]:
        """Gets the memory for a capture of these and touches it, in the background."""
        num_bytes, pinned = buffer_bytes(objects), _is_pinned(sources)

        def act() -> None:
            with self._lock:
                if self._reserve(num_bytes, pinned=pinned) and not pinned:
                    for start in range(0, num_bytes, _TOUCH_BYTES):
                        self._bytes[start : start + _TOUCH_BYTES].zero_()

        return background.begin(act, "snapshot-prepare")

    def capture(self, objects: Sequence[PlannedObject], sources: Sequence[torch.Tensor]) -> Future[memoryview]:
        """Begins to copy the header of every planned object and `sources[box.index]` (a tensor of the box's shape) of
        each of its boxes, as this thread's work so far leaves them. They must not change until the result is there.

        The result is the buffer's memory: object `o` with its header lies at [o.buffer_start, o.buffer_start +
        o.num_bytes). Valid until the next call.
        """
        assert all(source.device.type in ("cpu", "cuda") for source in sources), "no stream is known for this device"
        devices = {source.device for source in sources if source.device.type == "cuda"}
        marks = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        return background.begin(lambda: self._capture(objects, sources, marks), "snapshot-capture")

    def _capture(
        self,
        objects: Sequence[PlannedObject],
        sources: Sequence[torch.Tensor],
        marks: Mapping[torch.device, torch.cuda.Event],
    ) -> memoryview:
        with self._lock, torch.no_grad():
            self._reserve(buffer_bytes(objects), pinned=bool(marks))
            memory: memoryview = self._bytes.numpy().data
            for planned in objects:
                memory[planned.buffer_start : planned.data_start] = planned.header
            streams = {device: self._stream(device) for device in marks}
            for device, side in streams.items():
                side.wait_event(marks[device])
            on_host: list[tuple[int, torch.Tensor]] = []
            for planned in objects:
                for box, start in planned.boxes:
                    source = sources[box.index]
                    if source.device in streams:
                        with torch.cuda.stream(streams[source.device]):
                            self._copy(planned.data_start + start, source)
                    else:
                        on_host += _pieces(planned.data_start + start, source)
            num_copiers = _num_copiers(sum(source.nbytes for _, source in on_host))
            background.each(lambda number: self._copy(*on_host[number]), len(on_host), num_copiers, "snapshot-copy")
            for side in streams.values():
                side.synchronize()
            return memory

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _reserve(self, num_bytes: int, *, pinned: bool) -> bool:
        """Makes room; whether the memory is new, and so untouched where it is not page-locked."""
        pinned = pinned and self._own_mapped is None
        if self._bytes.numel() >= num_bytes and not (pinned and not self._bytes.is_pinned()):
            return False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        mapped = self._own_mapped or _mapped
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) if pinned else mapped(num_bytes)
        return True

    def _copy(self, start: int, source: torch.Tensor) -> None:
        stop = start + source.numel() * source.element_size()
        target = self._bytes[start:stop]
        if source.dtype == torch.uint8 and source.dim() == 1 and source.device.type == "cpu":
            np.copyto(target.numpy(), source.numpy())  # torch's own takes twice as long where memory is not aligned
        else:
            target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


def _pieces(start: int, source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor in host memory, to be copied to byte `start`, as parts that threads copy side by side: bytes where it is
    contiguous, else the tensor.
    """
    if not source.is_contiguous():
        yield start, source
        return
    data = source.reshape(-1).view(torch.uint8)
    for at in range(0, data.numel(), _COPY_BYTES):
        yield start + at, data[at : at + _COPY_BYTES]


def _num_copiers(num_bytes: int) -> int:
    return min(_MAX_COPIERS, len(os.sched_getaffinity(0)), 1 + num_bytes // _COPY_BYTES)


def owned_boxes(tensors: Sequence[HeldTensor]) -> tuple[list[OwnedBox], list[torch.Tensor]]:
    """The boxes that this rank writes, and the views of the live tensors that hold them.

    An empty box is written only for a tensor that has no elements at all, so that its name and type are not lost.
    """
    owned: list[OwnedBox] = []
    sources: list[torch.Tensor] = []
    for held in tensors:
        dtype = str(held.local.dtype).removeprefix("torch.")
        assert dtype in DTYPES, f"{held.name}: a checkpoint cannot hold {held.local.dtype}"
        assert tuple(held.local.shape) == held.box.shape, (
            f"{held.name}: {tuple(held.local.shape)} is not its {held.box}"
        )
        box = owned_box(held.name, held.box, DTYPES[dtype].itemsize, held.replica, held.num_replicas)
        if box is not None and (box.num_elements > 0 or 0 in held.global_shape):
            owned.append(OwnedBox(held.name, dtype, held.global_shape, box, len(sources)))
            sources.append(cut(held.local, held.box, box))
    return owned, sources


def cut(local: torch.Tensor, held: Box, wanted: Box) -> torch.Tensor:
    """The view of `local`, which holds the box `held`, that is the box `wanted` (global indices)."""
    return local.detach()[held.slices_of(wanted)] if held.shape else local.detach()


def _is_pinned(sources: Sequence[torch.Tensor]) -> bool:
    return any(source.device.type == "cuda" for source in sources)


def _mapped(num_bytes: int) -> torch.Tensor:
    """Untouched memory of this process, in huge pages where the system has them."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
