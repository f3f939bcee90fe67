"""What a rank trains on in one step: its slots of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """What one dp rank reads for one step: int64 [num_slots * local_batch_size, S] each, slot by slot.

    targets: -100 doesn't count. document_ids: None where attention ignores documents.
    """

    tokens: Tensor
    targets: Tensor
    position_ids: Tensor
    document_ids: Tensor | None
    num_slots: int


def slots_of(batch: SlotBatch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Tokens, targets, position ids and document ids of each slot, [local_batch_size, S] each."""
    documents = (
        [None] * batch.num_slots if batch.document_ids is None else batch.document_ids.tensor_split(batch.num_slots)
    )
    others = (t.tensor_split(batch.num_slots) for t in (batch.tokens, batch.targets, batch.position_ids))
    return zip(*others, documents, strict=True)
