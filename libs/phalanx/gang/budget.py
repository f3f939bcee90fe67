"""How often a run may try again: pure. Attempts that brought a new checkpoint are free; those that brought none use the
budget up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.gang.cause import Cause

_NEVER_RETRIED = ("user_error", "interrupted", "superseded")


@dataclass(frozen=True, slots=True)
class Budget:
    """max_attempts_without_progress: this many attempts in a row without a new checkpoint end the run. spent: of them,
    so far.
    """

    max_attempts_without_progress: int = 3
    spent: int = 0

    def __post_init__(self) -> None:
        assert self.max_attempts_without_progress >= 1

    def after(self, *, committed: bool) -> Budget:
        """The budget after a failed attempt that did or did not commit a checkpoint."""
        return replace(self, spent=0 if committed else self.spent + 1)

    def allows_after(self, cause: Cause) -> bool:
        """Whether another attempt follows one that failed by `cause` (already counted by `after`)."""
        return cause.kind not in _NEVER_RETRIED and self.spent < self.max_attempts_without_progress
