"""A job that a command names: by its file, by the URL of its root, or as the services know it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.context import open_client
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.checkpoint.place import JobPlace
    from phalanx.spec import Job


def is_submitted(job: str) -> bool:
    """Whether it is neither a URL nor a file: then it is the name of a submitted job."""
    return "://" not in job and not job.endswith(".toml") and not Path(job).exists()


def job_of(job: str, overrides: Sequence[str], context: Path | None) -> Job:
    """The job of a file, or the submitted job of that name as it was last resumed."""
    from phalanx.spec import load_job, parse_job

    if not is_submitted(job):
        return load_job(job, overrides)
    if overrides:
        raise PhalanxError(
            "--set", value=overrides[0], expected="none with a submitted job", remedy="name its job file instead"
        )
    with open_client(context) as client:
        return parse_job(dict(client.job(job).spec), where=job)


def place_of(job: str, overrides: Sequence[str], context: Path | None) -> JobPlace:
    """Where the job is kept. Raises PhalanxError where there is no such job, or it was never started."""
    from phalanx.checkpoint.place import JobPlace, find_job
    from phalanx.trainer.places import job_store

    if not is_submitted(job):
        return find_job(job, overrides)
    spec = job_of(job, overrides, context)
    return JobPlace(job_store(spec), spec)
