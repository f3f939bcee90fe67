"""Writes one rank's share of a checkpoint from the tensors themselves: objects, then the values, the part object last.

Unlike `phalanx.snapshot.writer` it copies nothing first: the tensors are those of a blocking save, or were staged by
`dcp.async_save` already. Every object is created once; killed anywhere it leaves objects that no manifest names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.lineage import ObjectRef, keys
from phalanx.objects import ObjectStore
from phalanx.snapshot import background
from phalanx.snapshot.dcp.values import SUFFIX
from phalanx.snapshot.grouping import OwnedBox, PlannedObject, plan_objects
from phalanx.snapshot.parts import CHUNK_BYTES, Part
from phalanx.snapshot.share import NUM_WRITERS, Deadline, Share, Written


@dataclass(frozen=True, slots=True)
class Source:
    """A box that this rank writes, and the tensor (of the box's shape, on any device, in any strides) that holds it."""

    box: OwnedBox
    tensor: torch.Tensor


class Upload:
    """One rank's upload. head: the part without its lists. values: content of the values object, None for none."""

    def __init__(
        self, store: ObjectStore, head: Part, sources: Sequence[Source], values: bytes | None, deadline_s: float
    ) -> None:
        self._head, self._values = head, values
        self._tensors = {source.box.index: source.tensor for source in sources}
        self._objects = plan_objects([source.box for source in sources])
        self._share = Share(store, head, Deadline(head.step, deadline_s).check)

    def run(self) -> ObjectRef:
        """Creates all objects, then the part object; returns the latter. Raises what the store raises, OutsideError
        past the deadline and where another process writes as this rank.
        """

        def create(number: int) -> Written:
            planned = self._objects[number]
            return self._share.from_pieces(number, planned, self._pieces(planned))

        written = background.each(create, len(self._objects), NUM_WRITERS, "snapshot-write")
        if self._values is not None:
            key = f"{keys.objects(self._head.ref)}{keys.number(self._head.rank)}{SUFFIX}"
            written.append(self._share.put(key, self._values))
        return self._share.finish(written)

    def _pieces(self, planned: PlannedObject) -> Iterator[memoryview]:
        """The bytes of the boxes, row-major, in chunks; one box at a time is copied where its tensor is elsewhere or
        has other strides.
        """
        for box, _ in planned.boxes:
            tensor = self._tensors[box.index].detach().cpu().contiguous()
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            assert len(data) == box.num_bytes, (box, tensor.shape, tensor.dtype)
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
