"""Jobs by the registry: as submitted, and as they were last resumed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.data_service import register_job
from support.datasets import job_tables, write_dataset

from phalanx.data.registered import RegisteredJobs
from phalanx.lineage.events import EventLog, EventType, JobEvent, JobState
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store

NAME = JobName("default", "tiny")


@pytest.fixture
def cluster(tmp_path):
    return f"file://{tmp_path}/store", write_dataset(f"file://{tmp_path}/corpus") + "/train"


def append(log: EventLog, number: int, kind: EventType, **data) -> None:
    assert log.append(JobEvent(number, kind, JobState.QUEUED, "2026-01-01T00:00:00Z", f"w{number}", data=data))


def test_job_is_found_as_it_was_submitted_and_read_once(cluster, monkeypatch):
    job = register_job(*cluster)
    jobs = RegisteredJobs(open_store(cluster[0]))
    found = jobs.find(NAME)
    assert found.job == job and found.store.url.endswith("/projects/default/jobs/tiny")
    monkeypatch.setattr(jobs._registry, "job", lambda *_: pytest.fail("it was read again"))
    assert jobs.find(NAME) is found


@pytest.mark.parametrize("name", [JobName("default", "other"), JobName("Not", "a/name")])
def test_job_that_was_not_submitted_is_none(cluster, name):
    assert RegisteredJobs(open_store(cluster[0])).find(name) is None


def test_job_without_events_holds_as_it_was_submitted(cluster):
    register_job(*cluster)
    jobs = RegisteredJobs(open_store(cluster[0]))
    found = jobs.find(NAME)
    assert jobs.current(found) == found.job


def test_job_holds_as_it_was_last_resumed_and_events_are_read_once(cluster, monkeypatch):
    register_job(*cluster)
    jobs = RegisteredJobs(open_store(cluster[0]))
    found = jobs.find(NAME)
    log, read = EventLog(found.store), []
    original = EventLog.event
    monkeypatch.setattr(EventLog, "event", lambda self, number: read.append(number) or original(self, number))
    append(log, 1, EventType.SUBMITTED)
    append(log, 2, EventType.RESUMED, spec=job_tables(*cluster, steps=20))
    append(log, 3, EventType.RUNNING, spec="another thing")
    assert jobs.current(found).training.steps == 20
    append(log, 4, EventType.RESUMED, spec=job_tables(*cluster, steps=30))
    append(log, 5, EventType.RESUMED)
    assert jobs.current(found).training.steps == 30
    assert jobs.current(found).training.steps == 30
    assert sorted(read) == [1, 2, 3, 4, 5]


def test_service_imports_no_torch():
    code = "import sys, phalanx.data.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
