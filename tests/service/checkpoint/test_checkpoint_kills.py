"""SIGKILL of the service in the middle of commits and sweeps, and starts without its database."""

from __future__ import annotations

import dataclasses
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_process import Service
from support.checkpoints import a_draft, open_attempt, register, restores, save, write_parts

from phalanx.lineage import CheckpointRef, Lineage, keys

pytestmark = pytest.mark.timeout(180)
KILLS, SEED = 6, 7


@pytest.fixture
def own_service(tmp_path, storage):
    """Makes services with a process of their own."""
    made = []

    def make(**options):
        made.append(Service(tmp_path, storage, options))
        made[-1].start()
        return made[-1]

    yield make
    for service in made:
        service.close()


def kill_now_and_then(service, draw, is_over):
    """Kills and restarts the service at random moments, KILLS times or until it is over."""
    for _ in range(KILLS):
        if is_over.wait(draw.uniform(0.02, 0.5)):
            return
        assert service.kill() == -signal.SIGKILL
        service.start()


def test_commits_go_through_kills_each_exactly_once(own_service):
    service = own_service(grace_s=0.0, interval_s=0.1)
    jobs = [register(service.root, f"k{number}", keep_latest_k=2) for number in range(4)]
    gangs = {job.uid: service.gang(job, open_attempt(job.store()).number) for job in jobs}
    is_over = threading.Event()

    def train(job):
        store, gang, name = job.store(), gangs[job.uid], str(job.name)
        for step in range(1, 9):
            ref = CheckpointRef(1, step)
            gang.begin(name, ref, 2, timeout_s=60)
            write_parts(store, ref, 2, first_step=step)
            gang.commit(name, a_draft(ref, 2), 60)
            assert restores(store, ref)

    with ThreadPoolExecutor(len(jobs) + 1) as pool:
        killing = pool.submit(kill_now_and_then, service, random.Random(SEED), is_over)
        training = [pool.submit(train, job) for job in jobs]
        for future in training:
            future.result(150)
        is_over.set()
        killing.result(60)
    service.kill()  # it may be behind with taking older ones away
    for job in jobs:
        found = Lineage(job.store()).checkpoints()
        assert found[-1] == CheckpointRef(1, 8) and all(restores(job.store(), ref) for ref in found)
        recorded = sorted(step for rows, _ in Lineage(job.store()).records.live() for step in rows.step.tolist())
        assert recorded == list(range(1, 9))


def test_sweeps_go_through_kills_and_leave_only_whole_checkpoints(own_service):
    service = own_service(grace_s=0.0, interval_s=0.02)
    job = register(service.root, "sweep", keep_latest_k=1)
    store, draw, step = job.store(), random.Random(SEED), 0
    open_attempt(store)
    for _ in range(KILLS):
        for _ in range(3):
            step += 1
            save(store, CheckpointRef(1, step), 4, first_step=step)
        write_parts(store, CheckpointRef(1, step + 1), 4, ranks=[1, 2])
        step += 1
        time.sleep(draw.uniform(0.0, 0.15))
        service.kill()
        for ref in Lineage(store).checkpoints():
            assert restores(store, ref)
        service.start()
    save(store, CheckpointRef(1, step + 1), 4, first_step=step)
    left = {None, CheckpointRef(1, step + 1)}
    end_s = time.monotonic() + 60
    while {keys.checkpoint_of(info.key) for info in store.list() if not keys.retired_ref(info.key)} != left:
        assert time.monotonic() < end_s, "what nobody needs is still there"
        time.sleep(0.05)
    assert restores(store, CheckpointRef(1, step + 1))


def test_database_that_is_lost_is_made_anew_from_storage(own_service):
    service = own_service(grace_s=0.0, interval_s=3600.0)
    job = register(service.root, "lost")
    store, name = job.store(), str(job.name)
    open_attempt(store)
    for step in (2, 4, 6):
        save(store, CheckpointRef(1, step), 2, first_step=step - 1)
    open_attempt(store, avoid=[CheckpointRef(1, 6)])
    service.gang(job, 2).report_damage(name, 2, CheckpointRef(1, 4), "flipped")
    service.client().pin(name, "2", "keep")
    service.gang(job, 2).begin(name, CheckpointRef(2, 8), 2)
    write_parts(store, CheckpointRef(2, 8), 2, ranks=[0])

    def told():
        listing = service.client().list(name, include_dead=True)
        return listing.revision, [dataclasses.replace(view, created=None) for view in listing.checkpoints]

    before = told()
    service.kill()
    service.start()
    assert told() == before
    service.kill()
    for path in service.folder.glob("checkpoint.sqlite*"):
        path.unlink()
    service.start()
    assert told() == before
    assert service.client().prune(name).removals[0].ref == CheckpointRef(1, 6)
    assert told()[1] == [view for view in before[1] if view.ref != CheckpointRef(1, 6)]


def test_commit_that_was_asked_before_a_kill_is_found_again_afterwards(own_service):
    service = own_service(grace_s=0.0, interval_s=3600.0)
    job = register(service.root, "again")
    store, ref = job.store(), CheckpointRef(1, 2)
    open_attempt(store)
    gang = service.gang(job, 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gang.commit, str(job.name), a_draft(ref, 2), 60)
        while not gang.list(str(job.name), include_dead=True).checkpoints:
            write_parts(store, ref, 2, ranks=[0])
        service.kill()
        write_parts(store, ref, 2, ranks=[1])
        service.start()
        assert asked.result(60).ref == ref
    assert restores(store, ref)


def test_service_ends_at_once_and_cleanly_when_told_to_while_a_commit_waits(own_service):
    service = own_service(grace_s=0.0, interval_s=3600.0)
    job = register(service.root, "ends")
    open_attempt(job.store())
    gang = service.gang(job, 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gang.commit, str(job.name), a_draft(CheckpointRef(1, 2)), 30)
        service.client().list(str(job.name))
        began_s = time.monotonic()
        assert service.kill(signal.SIGTERM) == 0
        assert time.monotonic() - began_s < 15
        service.start()
        write_parts(job.store(), CheckpointRef(1, 2))
        assert asked.result(60).ref == CheckpointRef(1, 2)
