"""Operators' questions and writes through a real checkpoint service: list, resolve, verify, pin, prune, delete."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.checkpoints import CODE, IDENTITY, open_attempt, register, restores, save, spec_of, write_parts

from phalanx.checkpoint.client import State
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, ForkPoint, Lineage, keys
from phalanx.lineage.events import EventLog, EventType, JobEvent, JobState
from phalanx.lineage.registry import Origin
from phalanx.rpc import AlreadyExists, Denied, FailedPrecondition, NotFound, Role
from phalanx.snapshot.fork import import_checkpoint

pytestmark = pytest.mark.timeout(120)


def refs(*steps, attempt=1):
    return [CheckpointRef(attempt, step) for step in steps]


@pytest.fixture
def job(new_job):
    """A job that keeps two, with checkpoints at 2, 4, 6, 8 of attempt 1."""
    return filled(new_job(keep_latest_k=2))


def filled(job):
    open_attempt(job.store())
    for ref in refs(2, 4, 6, 8):
        save(job.store(), ref, first_step=ref.step - 1)
    return job


def steps(client, job, **options):
    return [view.ref.step for view in client.list(str(job.name), **options).checkpoints]


def test_list_shows_states_in_pages_and_resolve_finds_live_ones(service, job):
    name, client = str(job.name), service.client(Role.VIEWER)
    open_attempt(job.store(), avoid=refs(8))
    write_parts(job.store(), CheckpointRef(2, 10))
    everything = client.list(name, include_dead=True, page_size=2).checkpoints
    assert [(view.ref.attempt, view.ref.step, view.state) for view in everything] == [
        (1, 2, State.LIVE),
        (1, 4, State.LIVE),
        (1, 6, State.LIVE),
        (1, 8, State.DEAD),
        (2, 10, State.OPEN),
    ]
    assert steps(client, job) == [2, 4, 6]
    assert client.resolve(name).ref == CheckpointRef(1, 6)
    assert client.resolve(name, "4").ref == client.resolve(name, "a1-s4").ref == CheckpointRef(1, 4)
    with pytest.raises(NotFound, match="2, 4, 6"):
        client.resolve(name, "8")
    for wrong in ("a1-s8", "newest", "a0-s1", ""):
        with pytest.raises(PhalanxError):
            client.resolve(name, wrong)


def test_verify_tells_progress_and_names_the_damaged_tensor(service, job):
    name, client, store = str(job.name), service.client(Role.VIEWER), job.store()
    *_, last = client.verify(name, "4")
    assert last.findings == () and last.done_bytes == last.total_bytes > 0
    key = keys.tensors(CheckpointRef(1, 6), keys.number(0), 0)
    data = store.read(key)
    store.delete(key)
    store.create(key, data[:-1] + bytes([data[-1] ^ 1]))
    *_, last = client.verify(name, "6")
    assert last.findings is not None
    assert [(finding.key, finding.tensors) for finding in last.findings] == [(key, ("model.w",))]


def test_prune_explains_first_and_then_removes_exactly_that(service, job):
    name, client = str(job.name), service.client()
    told = client.prune(name, dry_run=True)
    assert [(removal.ref.step, removal.removed) for removal in told.removals] == [(2, False), (4, False)]
    assert {kept.ref.step: kept.why for kept in told.kept} == {
        6: "among the newest 2 (checkpoint.keep_latest_k)",
        8: "the newest live checkpoint",
    }
    assert steps(client, job) == [2, 4, 6, 8]
    done = client.prune(name, request_id=f"prune-{job.uid}")
    assert [(removal.ref.step, removal.removed) for removal in done.removals] == [(2, True), (4, True)]
    assert client.prune(name, request_id=f"prune-{job.uid}") == done
    assert steps(client, job, include_dead=True) == [6, 8]
    assert all(restores(job.store(), ref) for ref in refs(6, 8))
    recorded = sorted(step for rows, _ in Lineage(job.store()).records.live() for step in rows.step.tolist())
    assert recorded == list(range(1, 9))
    with pytest.raises(Denied):
        service.client(Role.VIEWER).prune(name)


def test_pins_are_decisions_in_storage_with_revisions_and_keep_what_they_name(service, job):
    name, client = str(job.name), service.client()
    view, revision = client.pin(name, "2", "for the paper", request_id="one")
    assert (view.ref, view.pin_reason, revision) == (CheckpointRef(1, 2), "for the paper", 1)
    assert client.pin(name, "2", "for the paper", request_id="one") == (view, 1)
    with pytest.raises(AlreadyExists):
        client.pin(name, "4", "other", request_id="one")
    with pytest.raises(FailedPrecondition, match="revision"):
        client.pin(name, "4", "other", expected_revision=7)
    assert client.prune(name).kept[0].why == "pinned: for the paper"
    assert steps(client, job) == [2, 6, 8]
    with pytest.raises(FailedPrecondition, match="pinned"):
        client.delete(name, "2")
    view, revision = client.unpin(name, "2", expected_revision=1, request_id="two")
    assert view.pin_reason is None and revision == 2 == client.list(name).revision
    assert client.unpin(name, "2", request_id="two")[1] == 2
    with pytest.raises(FailedPrecondition):
        client.unpin(name, "2")
    assert [info.key for info in service.root.list(f"registry/pins/p/{job.uid}/")] == [
        f"registry/pins/p/{job.uid}/{number:08d}.json" for number in (1, 2)
    ]
    client.prune(name)
    assert steps(client, job) == [6, 8]
    with pytest.raises(NotFound):
        client.pin(name, "2", "too late")


def test_pins_at_once_all_count_each_once(service, job):
    name = str(job.name)
    clients = [service.client() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        work = zip(clients, (2, 4, 6, 8), strict=True)
        done = list(pool.map(lambda pair: pair[0].pin(name, str(pair[1]), "r"), work))
    assert sorted(revision for _, revision in done) == [1, 2, 3, 4]
    assert all(view.pin_reason == "r" for view in clients[0].list(name).checkpoints)


def test_delete_removes_one_checkpoint_at_once_and_refuses_what_is_needed(service, job):
    name, client, store = str(job.name), service.client(), job.store()
    num_objects, num_bytes = client.delete(name, "4", request_id=f"delete-{job.uid}")
    assert num_objects == 3 and num_bytes > 0
    assert client.delete(name, "4", request_id=f"delete-{job.uid}") == (num_objects, num_bytes)
    assert steps(client, job) == [2, 6, 8]
    assert [info.key for info in store.list(keys.checkpoint(CheckpointRef(1, 4)))] == [
        keys.retired(CheckpointRef(1, 4))
    ]
    with pytest.raises(FailedPrecondition, match="newest live"):
        client.delete(name, "8")
    open_attempt(store, avoid=refs(8))
    with pytest.raises(FailedPrecondition, match="attempt 2 started from it"):
        client.delete(name, "6")
    client.delete(name, "a1-s8")
    with pytest.raises(NotFound):
        client.delete(name, "4")
    with pytest.raises(PhalanxError):
        client.delete(name, "latest")


def test_origin_of_a_fork_stays_until_the_fork_has_a_checkpoint_of_its_own(service, job):
    name, client = str(job.name), service.client()
    fork = register(service.root, f"{job.uid}-fork", origin=Origin("p", job.uid, 1, 2))
    assert client.prune(name).kept[0].why == f"{fork.name} was forked from it and has not copied it yet"
    with pytest.raises(FailedPrecondition, match="forked"):
        client.delete(name, "2")
    point = ForkPoint("p", job.uid, 1, 2, 16)
    Lineage(fork.store()).create_job(request_id="f", spec={}, identity={}, identity_digest=IDENTITY, origin=point)
    assert not client.prune(name).removals
    import_checkpoint(job.store(), fork.store(), point, code_digest=CODE, identity_digest=IDENTITY)
    client.prune(name)
    assert steps(client, job) == [6, 8] and steps(client, fork) == [2]


def test_policy_that_a_resume_changed_holds_from_then_on(service, job):
    name, client = str(job.name), service.client()
    spec = spec_of(job.uid, service.root.url, keep_latest_k=1)
    log, state = EventLog(job.store()), JobState.QUEUED
    assert log.append(JobEvent(1, EventType.SUBMITTED, state, "now", "w1"))
    assert len(client.prune(name, dry_run=True).removals) == 2
    assert log.append(JobEvent(2, EventType.RESUMED, state, "now", "w2", data={"spec": spec}))
    client.prune(name)
    assert steps(client, job) == [8]


def test_job_that_is_not_registered_is_never_touched(service, job):
    stranger = service.root.within("projects/p/jobs/stranger")
    open_attempt(stranger)
    write_parts(stranger, CheckpointRef(1, 2))
    open_attempt(stranger)
    before = [info.key for info in stranger.list()]
    with pytest.raises(NotFound):
        service.client().prune("projects/p/jobs/stranger")
    service.client().prune(str(job.name))
    assert [info.key for info in stranger.list()] == before
