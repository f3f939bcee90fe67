"""Settings that were written down but do nothing here: told as a warning, because the user believes that they do
something."""

from __future__ import annotations

from phalanx.spec.job import Job
from phalanx.spec.layout import Layout


def without_effect(job: Job, layout: Layout) -> tuple[str, ...]:
    """One sentence for each key that was set and has no effect in this layout."""
    parallel, schedule = job.parallel, job.lr_scheduler
    rules = (
        (layout.pp == 1 and "schedule" in parallel.model_fields_set, "parallel.schedule", "parallel.pp is 1"),
        (
            schedule.decay_type == "none" and "min_lr_factor" in schedule.model_fields_set,
            "lr_scheduler.min_lr_factor",
            'lr_scheduler.decay_type is "none"',
        ),
        (
            not job.validation.freq and "windows" in job.validation.model_fields_set,
            "validation.windows",
            "validation.freq is 0",
        ),
        (job.cluster.device == "cpu" and job.cluster.gpu is not None, "cluster.gpu", 'cluster.device is "cpu"'),
        (
            job.checkpoint.keep_latest_k > 0,
            "checkpoint.keep_latest_k",
            "nothing deletes checkpoints in this version: all of them stay",
        ),
        (
            job.data.held_out is None and job.data.held_out_digest is not None,
            "data.held_out_digest",
            "data.held_out is not set",
        ),
    )
    return tuple(f"{name} has no effect, because {reason}" for applies, name, reason in rules if applies)
