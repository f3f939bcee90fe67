"""The one error of this room: an object of a job that is not what its key promises."""

from __future__ import annotations

from phalanx.core.errors import OutsideError
from phalanx.lineage import keys
from phalanx.lineage.values import CheckpointRef


class DamagedObject(OutsideError):
    """An object of the job is missing, damaged or foreign; the message names its key and what is wrong with it.

    checkpoint: the checkpoint that the object belongs to (what the next attempt should avoid), or None.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(f"object {key} {reason}")

    @property
    def checkpoint(self) -> CheckpointRef | None:
        """The checkpoint below whose prefix the object lies, so that a caller can avoid it."""
        return keys.checkpoint_of(self.key)
