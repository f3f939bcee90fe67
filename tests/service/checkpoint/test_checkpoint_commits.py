"""A gang's writes through a real checkpoint service: begin, commit, give up, report damage."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.checkpoints import a_draft, open_attempt, restores, save, write_parts

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as pb
from phalanx.checkpoint.client import State
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.plan import damaged_checkpoints
from phalanx.rpc import AlreadyExists, Denied, FailedPrecondition, NotFound, Role, Superseded, TimedOut
from phalanx.snapshot.draft_message import draft_message

pytestmark = pytest.mark.timeout(120)


def test_commit_of_a_written_save_makes_a_live_checkpoint_that_restores(service, new_job):
    job = new_job()
    store, attempt = job.store(), open_attempt(job.store())
    ref = CheckpointRef(attempt.number, 5)
    gang = service.gang(job, 1)
    gang.begin(str(job.name), ref, 2)
    assert [view.state for view in gang.list(str(job.name), include_dead=True).checkpoints] == [State.OPEN]
    write_parts(store, ref, 2, first_step=1)
    view = gang.commit(str(job.name), a_draft(ref, 2), 30)
    assert (view.ref, view.state, view.world_size) == (ref, State.LIVE, 2)
    assert Lineage(store).checkpoints() == (ref,) and restores(store, ref)
    assert view.num_bytes > 48 and view.created is not None
    assert gang.commit(str(job.name), a_draft(ref, 2), 30) == view
    gang.begin(str(job.name), ref, 2)
    assert gang.list(str(job.name), include_dead=True).checkpoints == (view,)


def test_commit_waits_for_parts_that_come_later(service, new_job):
    job = new_job()
    store = job.store()
    open_attempt(store)
    ref = CheckpointRef(1, 5)
    write_parts(store, ref, 2, ranks=[0])
    gang = service.gang(job, 1)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(gang.commit, str(job.name), a_draft(ref, 2), 60) for _ in range(2)]
        with pytest.raises(FailedPrecondition):
            _until_refused(gang, str(job.name), ref)
        write_parts(store, ref, 2, ranks=[1])
        assert {future.result(60).ref for future in both} == {ref}
    assert restores(store, ref)


def _until_refused(gang, job, ref):
    """Gives the save up, which is refused once its commit is under way."""
    while True:
        gang.abort(job, ref)


def test_commit_without_all_parts_fails_by_its_deadline_and_names_the_rank(service, new_job):
    job = new_job()
    open_attempt(job.store())
    ref = CheckpointRef(1, 5)
    write_parts(job.store(), ref, 2, ranks=[0])
    with pytest.raises(OutsideError, match=r"no part of ranks 1 within"):
        service.gang(job, 1).commit(str(job.name), a_draft(ref, 2), 0.5)
    assert Lineage(job.store()).checkpoints() == ()


def test_writes_of_a_superseded_attempt_are_refused_as_superseded(service, new_job):
    job = new_job()
    store = job.store()
    open_attempt(store), open_attempt(store)
    ref = CheckpointRef(1, 5)
    write_parts(store, ref)
    gang, name = service.gang(job, 1), str(job.name)
    for write in (
        lambda: gang.begin(name, ref, 1),
        lambda: gang.commit(name, a_draft(ref), 5),
        lambda: gang.abort(name, ref),
        lambda: gang.report_damage(name, 1, ref, "flipped"),
    ):
        with pytest.raises(Superseded, match=r"newest attempt, which is 2"):
            write()
    with pytest.raises(FailedPrecondition):
        service.gang(job, 3).begin(name, CheckpointRef(3, 5), 1)


def test_writes_need_the_token_of_exactly_that_attempt(service, new_job):
    job, other = new_job(), new_job()
    open_attempt(job.store()), open_attempt(job.store())
    name, ref = str(job.name), CheckpointRef(2, 5)
    for client in (
        service.client(),
        service.client(Role.VIEWER),
        service.client(Role.AGENT),
        service.gang(job, 1),
        service.gang(other, 2),
    ):
        for write in (
            lambda client=client: client.begin(name, ref, 1),
            lambda client=client: client.commit(name, a_draft(ref), 5),
            lambda client=client: client.abort(name, ref),
            lambda client=client: client.report_damage(name, 2, ref, "flipped"),
        ):
            with pytest.raises(Denied):
                write()
    assert '"audit": "refused"' in service.log()
    assert Lineage(job.store()).checkpoints() == ()


def test_commit_of_another_draft_at_the_same_step_is_refused(service, new_job):
    job = new_job()
    open_attempt(job.store())
    ref = CheckpointRef(1, 5)
    write_parts(job.store(), ref)
    gang = service.gang(job, 1)
    gang.commit(str(job.name), a_draft(ref), 30)
    other = a_draft(ref)
    object.__setattr__(other, "schedule", {"tokens": 1})
    with pytest.raises(AlreadyExists):
        gang.commit(str(job.name), other, 30)


def test_a_job_that_is_not_registered_is_not_found(service, new_job):
    job = new_job()
    with pytest.raises(NotFound, match="submitted"):
        service.client().list(str(job.name) + "x")


def test_report_of_damage_keeps_the_next_attempt_from_starting_there(service, new_job):
    """Case 7."""
    job = new_job()
    store = job.store()
    open_attempt(store)
    save(store, CheckpointRef(1, 5)), save(store, CheckpointRef(1, 10))
    assert open_attempt(store).parent == CheckpointRef(1, 10)
    gang = service.gang(job, 2)
    for _ in range(2):
        gang.report_damage(str(job.name), 2, CheckpointRef(1, 10), "object x is damaged")
    lineage = Lineage(store)
    assert damaged_checkpoints(lineage) == {CheckpointRef(1, 10)}
    (entry,) = lineage.journal(2)
    assert entry.position == 80 and entry.payload["why"] == "object x is damaged"
    views = gang.list(str(job.name), include_dead=True).checkpoints
    assert [(view.ref.step, view.state) for view in views] == [(5, State.LIVE), (10, State.DAMAGED)]
    assert gang.resolve(str(job.name)).ref == CheckpointRef(1, 5)


def test_commits_of_many_jobs_at_once_all_succeed_beside_some_that_wait(service, new_job):
    jobs = [new_job() for _ in range(24)]
    for job in jobs:
        open_attempt(job.store())
    slow, ready = jobs[:8], jobs[8:]
    for job in ready:
        write_parts(job.store(), CheckpointRef(1, 5), 2)
    gangs = {job.uid: service.gang(job, 1) for job in jobs}

    def commit(job):
        return gangs[job.uid].commit(str(job.name), a_draft(CheckpointRef(1, 5), 2), 60)

    with ThreadPoolExecutor(len(jobs)) as pool:
        waiting = [pool.submit(commit, job) for job in slow]
        done = [pool.submit(commit, job) for job in ready]
        assert all(future.result(60).state == State.LIVE for future in done)
        assert not any(future.done() for future in waiting)
        for job in slow:
            write_parts(job.store(), CheckpointRef(1, 5), 2)
        assert all(future.result(60).state == State.LIVE for future in waiting)


def test_commit_goes_on_when_its_client_went_away(service, new_job):
    job = new_job()
    open_attempt(job.store())
    ref = CheckpointRef(1, 5)
    gang = service.gang(job, 1)
    request = pb.CommitCheckpointRequest(job=str(job.name), draft=draft_message(a_draft(ref)))
    with pytest.raises(TimedOut):
        gang._stub.CommitCheckpoint(request, timeout=1)
    write_parts(job.store(), ref)
    end_s = time.monotonic() + 30
    while Lineage(job.store()).checkpoints() != (ref,):
        assert time.monotonic() < end_s, "the commit was given up"
        time.sleep(0.02)
    assert gang.commit(str(job.name), a_draft(ref), 30).state == State.LIVE


def test_metrics_tell_calls_and_collections(service, new_job):
    job = new_job()
    open_attempt(job.store())
    service.client().prune(str(job.name))
    address = service.log().rpartition("metrics at ")[2].split()[0]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'phalanx_checkpoint_collections_total{outcome="complete"}' in text
    assert "phalanx_checkpoint_commits_in_flight 0.0" in text
    assert "phalanx_rpc_calls_total{" in text
