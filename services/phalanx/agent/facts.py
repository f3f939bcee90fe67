"""What the agent reads of a job's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.core.digest import digest_of
from phalanx.spec import Job, parse_job
from phalanx.trainer.code import own_code

DEFAULT_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class JobFacts:
    """job: the file; None for ranks that are started without one. digest: of all of it, for what was learned under one
    file says nothing of another.
    """

    job: Job | None = None
    digest: str = ""

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> JobFacts:
        """From what ranks are started with. Raises Problems where the file has mistakes."""
        if "job" not in arguments:
            return JobFacts()
        return JobFacts(parse_job(arguments["job"]), digest_of(arguments["job"]))

    @property
    def own_code(self) -> tuple[str, ...]:
        """What stands for the user's own code, as `trainer.code` has it."""
        return own_code(self.job) if self.job is not None else ()

    @property
    def grace_s(self) -> float:
        """From the word to stop until ranks are killed."""
        return self.job.deadlines.grace_s if self.job is not None else DEFAULT_GRACE_S

    @property
    def save_s(self) -> float:
        """How long a commit waits for the parts of all ranks; 0: as long as the checkpoint service does by itself."""
        return self.job.deadlines.save_s if self.job is not None else 0.0

    @property
    def ends_at_hang(self) -> bool:
        """Whether a hang ends the gang; otherwise it is only told."""
        return self.job is None or self.job.recovery.on_hang != "notify"
