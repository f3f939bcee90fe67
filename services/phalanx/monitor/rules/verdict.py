"""What a rule says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

MAX_ID = 200


class Kind(StrEnum):
    """What is wrong; names are those of the contract's causes."""

    NAN = "nan"
    SPIKE = "spike"
    DIVERGENCE = "divergence"
    HANG = "hang"
    STRAGGLER = "straggler"
    GPU_FAULT = "gpu_fault"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that went wrong.

    key_step: the step by which it is known, so that the same thing found again is the same incident; it is the first
    step where that never moves, and 0 for what is told once in an attempt. key: what else tells it from others.
    """

    kind: Kind
    attempt: int
    first_step: int
    last_step: int
    message: str
    key_step: int
    rank: int | None = None
    node: str = ""
    key: str = ""

    def id(self, job: str) -> str:
        """The same for the same job, attempt, kind, step and rank, whoever finds it and how often."""
        parts = [f"a{self.attempt}", self.kind.value, f"s{self.key_step}"]
        parts += [f"r{self.rank}"] if self.rank is not None else []
        parts += [self.key] if self.key else []
        name = f"{job or 'cluster'}/incidents/{'-'.join(parts)}"
        if len(name) <= MAX_ID:
            return name
        return f"{name[: MAX_ID - 17]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
