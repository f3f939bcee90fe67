"""Stores that promise less: a real Ceph radosgw, and a server that ignores the condition of a put. The mode is found by
trying, told, and one commit counts (docs/runbook.md).
"""

from __future__ import annotations

import dataclasses
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_process import Service
from support import ceph
from support.checkpoints import a_draft, open_attempt, register, restores, write_parts
from support.faulty_proxy import Spoiler, proxying
from support.jobs import run_cli
from support.ministack import Endpoint, set_environ

from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import ObjectExists, open_store
from phalanx.objects.s3 import PARTS_ABOVE_BYTES
from phalanx.rpc import AlreadyExists
from phalanx.trainer.promise import warnings_of

pytestmark = pytest.mark.timeout(420)
REF = CheckpointRef(1, 5)


@pytest.fixture(scope="module")
def radosgw() -> Iterator[str]:
    """URL of a bucket on a real radosgw, reached by this process's variables."""
    with ceph.running() as endpoint, pytest.MonkeyPatch.context() as patch:
        set_environ(patch, endpoint.environ)
        yield ceph.make_bucket(endpoint, "phalanx-tests")


@pytest.fixture
def unconditional(ministack: Endpoint, s3_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a place on a server that ignores every `If-None-Match`."""
    with proxying(ministack) as proxy:
        proxy.choose = ignoring_conditions
        set_environ(monkeypatch, {**ministack.credentials, "AWS_ENDPOINT_URL": proxy.endpoint})
        yield s3_prefix


def ignoring_conditions(method: str, path: str, number: int) -> Spoiler | None:
    return Spoiler(drop_header="if-none-match")


NewService = Callable[[str], Service]


@pytest.fixture
def own_service(tmp_path) -> Iterator[NewService]:
    made = []

    def start(storage: str) -> Service:
        made.append(Service(tmp_path, storage, {"grace_s": 0.0, "interval_s": 3600.0}))
        made[-1].start()
        return made[-1]

    yield start
    for service in made:
        service.close()


def commit_at_once(service: Service, num_drafts: int) -> list[object]:
    """Twenty commits of one checkpoint at once, of that many drafts: what each was told. The service is killed and
    started again meanwhile.
    """
    job = register(service.root, f"j-{uuid.uuid4().hex[:8]}")
    store = job.store()
    open_attempt(store)
    service.gang(job, 1).begin(str(job.name), REF, 2)
    write_parts(store, REF, 2, ranks=[0])
    gangs = [service.gang(job, 1) for _ in range(4)]
    start = threading.Barrier(21)

    def commit(number: int) -> object:
        draft = dataclasses.replace(a_draft(REF, 2), schedule={"tokens": number % num_drafts})
        start.wait()
        try:
            return gangs[number % 4].commit(str(job.name), draft, 90).ref
        except AlreadyExists:
            return AlreadyExists

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(commit, number) for number in range(20)]
        start.wait()
        service.kill()
        service.start()
        write_parts(store, REF, 2, ranks=[1])
        told = [future.result(120) for future in asked]
    assert Lineage(store).checkpoints() == (REF,) and restores(store, REF)
    return told


def test_radosgw_is_told_apart_by_doctor_and_puts_large_objects_whole(radosgw: str) -> None:
    """Case 11, 9: no create-only upload in parts there, so one of two large objects wins by a put of its own."""
    told = json.loads(run_cli(["doctor", "--storage", f"{radosgw}/doctor", "--deadline", "60", "--json"]).out)
    storage = told["storage"]
    assert (storage["promise"], storage["puts_whole"]) == ("full", True), storage
    store = open_store(f"{radosgw}/large", deadline_s=60)
    assert warnings_of(store) == ()
    contents = [bytes([number]) * (PARTS_ABOVE_BYTES + 1) for number in range(2)]

    def put(content: bytes) -> bool:
        try:
            with store.writer("object") as writer:
                writer.write(content)
                writer.commit()
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(put, contents))
    assert sorted(won) == [False, True]
    assert store.read("object") == contents[won.index(True)]


def test_commits_on_radosgw_through_a_killed_service_make_one_checkpoint(radosgw: str, own_service: NewService) -> None:
    """Case 11, 1."""
    assert commit_at_once(own_service(f"{radosgw}/cluster"), num_drafts=1) == [REF] * 20


def test_commits_where_conditions_are_ignored_are_decided_by_the_services_database(
    unconditional: str, own_service: NewService
) -> None:
    """Case 11: the mode is told, and of two drafts one counts, whoever asks and however often."""
    done = run_cli(["doctor", "--storage", f"{unconditional}/doctor", "--json"])
    assert (done.code, json.loads(done.out)["storage"]["promise"]) == (1, "single-writer")
    (warning,) = warnings_of(open_store(f"{unconditional}/j"))
    assert "single-writer" in warning
    told = commit_at_once(own_service(f"{unconditional}/cluster"), num_drafts=2)
    assert {*told[0::2], *told[1::2]} == {REF, AlreadyExists}
    assert len({*told[0::2]}) == len({*told[1::2]}) == 1
