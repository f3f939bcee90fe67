"""What the step records in storage say of a run: its losses, its tokens, its speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.lineage import Lineage
from phalanx.spec import Job
from phalanx.trainer.places import job_store


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Of the live steps, by step. attempts: how many the job had."""

    losses: dict[int, float]
    tokens: int
    tokens_per_second: float
    attempts: int

    @property
    def steps(self) -> int:
        """The last step."""
        return max(self.losses)


def step_facts(job: Job) -> StepFacts:
    """Read from the records that the live checkpoints name."""
    lineage = Lineage(job_store(job))
    losses: dict[int, float] = {}
    total_s = 0.0
    for _, steps in lineage.records.live():
        losses |= {int(step): float(loss) for step, loss in zip(steps.step, steps.loss, strict=True)}
        total_s += float(steps.step_time_s.sum())
    tokens = len(losses) * job.training.global_batch_size * job.training.seq_len
    assert all(math.isfinite(loss) for loss in losses.values())
    return StepFacts(losses, tokens, tokens / total_s, len(lineage.attempts()))
