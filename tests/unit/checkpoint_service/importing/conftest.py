"""A small job, and what others would have saved of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.foreign_checkpoints import Foreign, job_of

from phalanx.spec import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job with a decoder of two layers that has not begun."""
    return job_of(tmp_path)


@pytest.fixture
def foreign(job: Job) -> Foreign:
    """Weights and optimizer state of the job's model, as another trainer holds them."""
    return Foreign.of(job)
