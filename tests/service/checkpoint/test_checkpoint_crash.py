"""SIGKILL of the service right before numbered operations of a save: begin and commit, storage and database."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint_process import Service
from support.checkpoints import a_draft, open_attempt, register, restores, save, write_parts

from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.registry import RegisteredJob

pytestmark = pytest.mark.timeout(900)
PROGRAM = str(Path(__file__).with_name("dying_service.py"))
OLD, NEW = CheckpointRef(1, 5), CheckpointRef(1, 10)
DEATHS = (1, 5, 9, 10)  # before which operation of each life: in begin, in commit, around its decision and its put
NO_DEATH = 100_000


@pytest.fixture
def own_service(tmp_path, storage):
    service = Service(tmp_path, storage, {"grace_s": 0.0, "interval_s": 3600.0})
    yield service
    service.close()


def live_again_and_again(service: Service, log: Path, job: RegisteredJob, is_over: threading.Event) -> int:
    """One life of the service after another, each ended at its operation; how many ended so. Between any two the
    checkpoint before is whole, and the new one is whole or absent.
    """
    for number, at in enumerate((*DEATHS, NO_DEATH)):
        process = service.spawn(PROGRAM, str(at), str(log))
        while process.poll() is None:
            if is_over.wait(0.05):
                return number
        assert process.returncode == -signal.SIGKILL, service.log()
        live = Lineage(job.store()).checkpoints()
        assert live in ((OLD,), (OLD, NEW)) and all(restores(job.store(), ref) for ref in live)
    raise AssertionError("the life without an end ended")


def test_service_killed_before_numbered_operations_of_a_save_makes_one_checkpoint(own_service, tmp_path):
    """Case 1: the gang asks again and again, as clients do; the service itself goes on from what is durable."""
    job = register(own_service.root, "numbered")
    store, log = job.store(), tmp_path / "operations"
    open_attempt(store)
    save(store, OLD, 2, first_step=1)
    gang, name = own_service.gang(job, 1), str(job.name)
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        lives = pool.submit(live_again_and_again, own_service, log, job, is_over)
        try:
            gang.begin(name, NEW, 2, timeout_s=600)
            write_parts(store, NEW, 2, first_step=6)
            view = gang.commit(name, a_draft(NEW, 2), 600)
        finally:
            is_over.set()
        assert lives.result(60) == len(DEATHS)
    assert view.ref == NEW and Lineage(store).checkpoints() == (OLD, NEW)
    assert all(restores(store, ref) for ref in (OLD, NEW))
    done = log.read_text().splitlines()
    assert {"database set_save", "database decide", "database note"} <= set(done)
    assert [view.ref for view in own_service.client().list(name).checkpoints] == [OLD, NEW]
