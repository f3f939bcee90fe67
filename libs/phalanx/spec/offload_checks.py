"""What optimizer state on a local disk can't go together with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding

if TYPE_CHECKING:
    from phalanx.spec.job import Job


def offload_findings(job: Job) -> Iterator[Finding]:
    """Rules of `optimizer.offload`."""
    optimizer = job.optimizer
    if optimizer.offload == "none":
        return
    if optimizer.offload_folder is None:
        yield Finding(
            ("optimizer.offload_folder", "optimizer.offload"),
            None,
            f'a folder beside optimizer.offload = "{optimizer.offload}"',
            "name one on a local disk of every node",
        )
    if optimizer.class_ is not None:
        yield Finding(
            ("optimizer.offload", "optimizer.class"),
            optimizer.offload,
            "none beside optimizer.class, whose state is made by the class itself",
            "remove it, or optimizer.class (that is another run)",
        )
    elif optimizer.name != "adamw":
        yield Finding(
            ("optimizer.offload", "optimizer.name"),
            optimizer.offload,
            f"none with the optimizer {optimizer.name}, which updates whole matrices",
            'remove it, or set optimizer.name = "adamw" (that is another run)',
        )
    if job.local_updates.steps:
        yield Finding(
            ("optimizer.offload", "local_updates.steps"),
            optimizer.offload,
            "none with local updates, which average the state over replicas in memory",
            "remove it, or set local_updates.steps = 0 (that is another run)",
        )
    if job.gradient_compression.method != "none":
        yield Finding(
            ("optimizer.offload", "gradient_compression.method"),
            optimizer.offload,
            "none with gradient compression, which holds what it left out in memory",
            'remove it, or set gradient_compression.method = "none" (that is another run)',
        )
    if job.checkpoint.memory_interval:
        yield Finding(
            ("checkpoint.memory_interval", "optimizer.offload"),
            job.checkpoint.memory_interval,
            "0 with optimizer state on a disk: a copy in memory would hold all of it",
            "remove it, or optimizer.offload",
        )
