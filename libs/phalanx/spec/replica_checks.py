"""Rules over the keys of what replicas tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelArgs

if TYPE_CHECKING:
    from phalanx.spec.job import Job

_CUT = ("pp", "cp", "tp")


def replica_findings(job: Job, layout: Layout | None) -> Iterator[Finding]:
    """What less traffic between replicas can't be combined with. Sizes that are still open (-1) are passed over."""
    steps, method = job.local_updates.steps, job.gradient_compression.method
    if steps:
        yield from _between_syncs(job, steps)
        yield from _common(job, "local_updates.steps", steps, 0)
    if method != "none":
        yield from _compression(job, method, layout)
        yield from _common(job, "gradient_compression.method", method, "none")
    if steps and method != "none":
        yield Finding(
            ("gradient_compression.method", "local_updates.steps"),
            method,
            '"none" beside local_updates, where replicas don\'t exchange gradients',
            "remove one of them",
        )


def layout_findings(job: Job) -> Iterator[Finding]:
    """Who lays out a run whose number of replicas changes what is learnt."""
    if job.has_apart_replicas and job.parallel.layout == "auto":
        name = "local_updates" if job.local_updates.steps else "gradient_compression"
        yield Finding(
            ("parallel.layout", f"{name}.{'steps' if job.local_updates.steps else 'method'}"),
            "auto",
            f'"given" with {name}, where the number of replicas changes what is learnt',
            f"set parallel.dp_replicate and the other sizes, or remove {name}",
        )


def _common(job: Job, name: str, value: object, off: object) -> Iterator[Finding]:
    """What no way of telling less goes together with."""
    if job.optimizer.class_ is not None:
        yield Finding(
            (name, "optimizer.class"),
            value,
            f"{off} beside optimizer.class: what replicas remember and exchange is known to be sound for AdamW only",
            "remove it, or optimizer.class",
        )
    if job.parallel.cpu_offload:
        yield Finding(
            (name, "parallel.cpu_offload"),
            value,
            f"{off} beside parallel.cpu_offload: what replicas exchange must lie on their devices",
            f"set parallel.cpu_offload = false, or remove {name}",
        )
    if isinstance(job.model.args, ModelArgs) and job.model.args.moe is not None:
        yield Finding(
            (name, "model.args.moe"),
            value,
            f"{off} with experts, whose balance is kept over all ranks at each step",
            "remove it, or train a dense model",
        )


def _compression(job: Job, method: str, layout: Layout | None) -> Iterator[Finding]:
    """Where gradients are compressed, and from when on."""
    name, warmup = "gradient_compression", job.gradient_compression.warmup_steps
    if method == "onebit_adam" and not warmup:
        yield Finding(
            (f"{name}.warmup_steps", f"{name}.method"),
            warmup,
            "at least 1 with onebit_adam, whose second moment is learnt in them",
            "set it to 15 to 20 % of training.steps",
        )
    for axis in _CUT:
        size = getattr(layout, axis) if layout else max(getattr(job.parallel, axis), 1)
        if size > 1:
            yield Finding(
                (f"parallel.{axis}", f"{name}.method"),
                size,
                f'1 with {name}.method = "{method}", which takes dp_replicate and dp_shard only',
                f'set {axis} = 1, {name}.method = "none", or train by local_updates',
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
