"""What can be wrong with a checkpoint: damage found while reading, and reasons why one did not come to be."""

from __future__ import annotations

from phalanx.core.errors import OutsideError
from phalanx.lineage import DamagedObject


class DamagedCheckpoint(DamagedObject):
    """Stored bytes are not those that were written. The checkpoint must not be used; an older one may be.

    key: the object. tensor: the tensor whose bytes are wrong, if one is known. chunk: number of the chunk inside the
    tensor's box. `checkpoint` (of DamagedObject) is what the next attempt should avoid.
    """

    def __init__(self, key: str, why: str, *, tensor: str | None = None, chunk: int | None = None) -> None:
        self.tensor, self.chunk = tensor, chunk
        where = "" if tensor is None else f" (tensor {tensor}" + (")" if chunk is None else f", chunk {chunk})")
        super().__init__(key, f"{why}{where}")


class IncompleteCheckpoint(OutsideError):
    """A checkpoint cannot be committed: parts or objects are missing, or the boxes do not cover the tensors once."""
