"""Rules over the keys of what replicas tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding
from phalanx.spec.model import ModelArgs

if TYPE_CHECKING:
    from phalanx.spec.job import Job


def replica_findings(job: Job) -> Iterator[Finding]:
    """What training by local updates can't be combined with."""
    steps = job.local_updates.steps
    if not steps:
        return
    yield from _between_syncs(job, steps)
    if job.optimizer.class_ is not None:
        yield Finding(
            ("local_updates.steps", "optimizer.class"),
            steps,
            "0 beside optimizer.class: the mean of what replicas remember is known to be sound for AdamW only",
            "remove it, or optimizer.class",
        )
    if job.parallel.cpu_offload:
        yield Finding(
            ("local_updates.steps", "parallel.cpu_offload"),
            steps,
            "0 beside parallel.cpu_offload: what replicas exchange must lie on their devices",
            "set parallel.cpu_offload = false, or remove local_updates.steps",
        )
    if isinstance(job.model.args, ModelArgs) and job.model.args.moe is not None:
        yield Finding(
            ("local_updates.steps", "model.args.moe"),
            steps,
            "0 with experts, whose balance is kept over all ranks at each step",
            "remove it, or train a dense model",
        )


def layout_findings(job: Job) -> Iterator[Finding]:
    """Who lays out a run whose number of replicas changes what is learnt."""
    if job.local_updates.steps and job.parallel.layout == "auto":
        yield Finding(
            ("parallel.layout", "local_updates.steps"),
            "auto",
            '"given" with local_updates, where the number of replicas changes what is learnt',
            "set parallel.dp_replicate and the other sizes, or remove local_updates.steps",
        )


def _between_syncs(job: Job, steps: int) -> Iterator[Finding]:
    """Whatever looks at the one model that is trained happens where the replicas are one."""
    periods = {
        "training.steps": job.training.steps,
        "checkpoint.interval": job.checkpoint.interval,
        "checkpoint.speculative_interval": job.checkpoint.speculative_interval,
        "checkpoint.memory_interval": job.checkpoint.memory_interval,
        "validation.freq": job.validation.freq,
    }
    for name, period in periods.items():
        if period % steps:
            yield Finding(
                (name, "local_updates.steps"),
                period,
                f"a multiple of local_updates.steps = {steps}, since only there all replicas hold one model",
                f"use {-(-period // steps) * steps}, or change local_updates.steps",
            )
