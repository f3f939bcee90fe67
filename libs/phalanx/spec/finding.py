"""A broken rule over several keys of the job file, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PhalanxError


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule. keys: every key that takes part, the one to change first; value: what that key holds."""

    keys: tuple[str, ...]
    value: object
    expected: str
    remedy: str

    @property
    def problem(self) -> PhalanxError:
        """The finding as the one line that a user reads."""
        return PhalanxError(self.keys[0], value=self.value, expected=self.expected, remedy=self.remedy)
