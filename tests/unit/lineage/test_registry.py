"""The registry and event logs: each object created once, read strictly."""

from __future__ import annotations

import pytest

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import DamagedObject
from phalanx.lineage.documents import encode_document
from phalanx.lineage.events import Assignment, Cause, EventLog, EventType, JobEvent, JobState, key_of
from phalanx.lineage.registry import JobName, Origin, RegisteredJob, Registry
from phalanx.objects import ObjectStore, open_store


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return open_store(f"file://{tmp_path_factory.mktemp('store')}")


def registered(uid: str = "tiny", request_id: str = "r1", **changes: object) -> RegisteredJob:
    spec = {"job": {"name": uid, "storage": "file:///nowhere"}}
    fields = {"project": "default", "uid": uid, "storage": "file:///nowhere", "spec": spec, "owner": "ann"}
    return RegisteredJob(**{**fields, "request_id": request_id, **changes})  # type: ignore[arg-type]


def event(number: int = 1, writer: str = "w", **changes: object) -> JobEvent:
    fields = {"type": EventType.SUBMITTED, "state": JobState.QUEUED, "time": "2026-01-01T00:00:00Z"}
    return JobEvent(number=number, writer=writer, **{**fields, **changes})  # type: ignore[arg-type]


def test_job_registered_is_read_back_equal(store: ObjectStore) -> None:
    job = registered(origin=Origin("default", "old", 1, 5), created="2026-01-01T00:00:00Z")
    assert Registry(store).create_job(job) == job
    assert Registry(store).job("default", "tiny") == job
    assert tuple(Registry(store).jobs()) == (job,)


def test_job_of_a_taken_name_returns_the_one_that_is_there(store: ObjectStore) -> None:
    first = Registry(store).create_job(registered())
    assert Registry(store).create_job(registered(request_id="r2")) == first


def test_registry_asked_for_what_is_not_there_returns_none(store: ObjectStore) -> None:
    assert Registry(store).job("default", "tiny") is None
    assert Registry(store).job("..", "../../etc") is None


def test_registry_of_several_projects_lists_one(store: ObjectStore) -> None:
    registry = Registry(store)
    for project, uid in (("a", "x"), ("a-b", "y"), ("a", "z")):
        registry.create_job(registered(uid, project=project))
    assert [str(name) for name in registry.names("a")] == ["projects/a/jobs/x", "projects/a/jobs/z"]
    assert len(tuple(registry.names())) == 3


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":2}', b'{"format":1,"project":3}'])
def test_registry_object_that_is_damaged_is_named(store: ObjectStore, data: bytes) -> None:
    store.create(registered().key, data)
    with pytest.raises(DamagedObject, match=r"registry/jobs/default/tiny\.json"):
        Registry(store).job("default", "tiny")


def test_registry_object_under_another_key_is_damaged(store: ObjectStore) -> None:
    store.create(registered().key, encode_document(registered("other")))
    with pytest.raises(DamagedObject, match="says that it is"):
        Registry(store).job("default", "tiny")


@pytest.mark.parametrize(
    "text", ["", "tiny", "projects/a/jobs/", "projects//jobs/x", "projects/a/jobs/x/y", "projects/A/jobs/x"]
)
def test_job_name_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PhalanxError):
        JobName.parse(text)
    assert str(JobName.parse("projects/a/jobs/x.1")) == "projects/a/jobs/x.1"


def test_event_log_appended_reads_back_in_order(store: ObjectStore) -> None:
    log = EventLog(store)
    cause = Cause("process_death", "killed by SIGKILL", rank=3, signal=9, node_id="n1")
    events = (event(1), event(2, cause=cause, placement=(Assignment("n1", (0, 1)),), data={"a": [1, 2]}), event(3))
    assert all(log.append(each) for each in events)
    assert tuple(log.after(0)) == events
    assert tuple(log.after(2)) == events[2:]
    assert log.newest() == 3


def test_event_number_that_is_taken_is_not_written(store: ObjectStore) -> None:
    log = EventLog(store)
    assert log.append(event(writer="one"))
    assert not log.append(event(writer="two"))
    assert log.append(event(writer="one")), "the same event again is the reply that was lost"
    assert log.event(1) == event(writer="one")


def test_event_log_with_a_gap_is_damaged(store: ObjectStore) -> None:
    log = EventLog(store)
    log.append(event(1))
    store.create(key_of(3), encode_document(event(3)))
    with pytest.raises(DamagedObject, match="gap"):
        log.newest()


def test_event_log_whose_storage_was_lost_is_not_begun_anew_over_it(store: ObjectStore) -> None:
    log = EventLog(store)
    assert log.append(event(1)) and log.append(event(2))
    store.delete(key_of(1))
    store.delete(key_of(2))
    with pytest.raises(OutsideError, match="event 2 of the job is gone, so event 3 is not written"):
        log.append(event(3))
    assert list(store.list()) == []


def test_event_under_another_number_is_damaged(store: ObjectStore) -> None:
    store.create(key_of(2), encode_document(event(1)))
    with pytest.raises(DamagedObject, match="says that it is event 1"):
        EventLog(store).event(2)
