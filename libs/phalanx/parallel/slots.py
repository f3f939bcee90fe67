"""What a rank trains on in one step: its slots of the global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """What one dp rank reads for one step: int64 [num_slots * local_batch_size, S] each, slot by slot.

    targets: -100 doesn't count. document_ids: None where attention ignores documents. window_weights: what each
    window's loss of balance counts, fp32 [num_slots * local_batch_size]; None for a model without routers.
    """

    tokens: Tensor
    targets: Tensor
    position_ids: Tensor
    document_ids: Tensor | None
    num_slots: int
    window_weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """One of them. targets: [local_batch_size, S]. inputs, named: what the model's forward takes."""

    targets: Tensor
    inputs: tuple[Tensor | None, ...]
    named: Mapping[str, Tensor]


def slots_of(batch: SlotBatch) -> Iterator[Slot]:
    """Each slot: tokens, position and document ids, by name the window weights where the model has routers."""
    fields = (batch.tokens, batch.position_ids, batch.document_ids)
    inputs = [[None] * batch.num_slots if t is None else t.tensor_split(batch.num_slots) for t in fields]
    weights = batch.window_weights
    named: list[dict[str, Tensor]] = [{}] * batch.num_slots
    if weights is not None:
        named = [{"window_weights": part} for part in weights.tensor_split(batch.num_slots)]
    return map(Slot, batch.targets.tensor_split(batch.num_slots), zip(*inputs, strict=True), named)
