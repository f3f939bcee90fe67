"""SIGKILL of the data service at random moments, and a database that is lost: nothing is lost, nothing there twice."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import pytest
from support.data_service import DataProcess, data_process, register_job
from support.datasets import open_attempt, write_dataset
from support.jobs import wait_until

from phalanx.data.client import Action, DatasetVersion
from phalanx.lineage import Lineage
from phalanx.objects import open_store
from phalanx.rpc import Unavailable
from phalanx.trainer.places import job_store

KILLS = 5
JOB = "projects/default/jobs/tiny"


class Killer:
    """Kills and restarts a service after random pauses while others work, until they are done."""

    def __init__(self, service: DataProcess, seed: int) -> None:
        self._service, self._draw, self._done = service, random.Random(seed), threading.Event()
        self.kills = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(self._draw.uniform(0.02, 0.5)) and self.kills < KILLS:
            self._service.kill()
            self.kills += 1
            self._service.start()
            with suppress(AssertionError):
                self._service.wait_ready()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join(120)
        self._service.wait_ready()


def until_answered(call, deadline_tries: int = 200):
    """What a client does whose service comes and goes: the same request again."""
    for _ in range(deadline_tries):
        try:
            return call()
        except Unavailable:
            continue
    raise AssertionError("never answered")


def everything(service: DataProcess) -> dict[str, tuple[DatasetVersion, ...]]:
    with service.client() as client:
        return {newest.dataset: client.dataset(newest.dataset) for newest in client.datasets()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_registrations_while_the_service_is_killed_are_each_there_once(tmp_path, seed):
    urls = [write_dataset(f"file://{tmp_path}/corpus{n}", seed=n, num_shards=2) for n in range(4)]
    with data_process(tmp_path) as service:
        answered: dict[str, DatasetVersion] = {}
        killer = Killer(service, seed)
        with killer, service.client() as client:
            number = 0
            while killer.kills < KILLS or number < 40:
                name, url, request = f"set{number % 5}", urls[number // 5 % 4], f"r{number}"
                answered[request] = until_answered(lambda n=name, u=url, r=request: client.register(n, u, r))
                number += 1
        registry = open_store(service.storage)
        stored = [info.key for info in registry.list("registry/datasets/")]
        assert sorted(stored) == [f"registry/datasets/set{s}/{v:08d}.json" for s in range(5) for v in range(1, 5)]
        found = everything(service)
        assert sum(len(versions) for versions in found.values()) == 20
        for request, version in answered.items():
            assert version in found[version.dataset], request


@pytest.mark.timeout(300)
def test_reports_while_the_service_is_killed_are_each_decided_once(tmp_path):
    data = write_dataset(f"file://{tmp_path}/corpus", num_shards=8)
    with data_process(tmp_path) as service:
        recovery = {"on_bad_shard": "skip", "bad_shard_budget": 1.0}
        job = register_job(service.storage, f"{data}/train", more={"recovery": recovery})
        open_attempt(job)
        for shard in range(0, 8, 2):
            (tmp_path / f"corpus/train/t-{shard:08d}.tar").write_bytes(b"damaged")
        answers = []
        killer = Killer(service, 3)
        with killer, service.gang() as client:
            number = 0
            while killer.kills < KILLS or number < 16:
                shard = f"t-{number % 8:08d}.tar"
                answers.append(
                    until_answered(lambda s=shard, n=number: client.report_damage(JOB, 1, s, f"try {n}", 1 + n % 3))
                )
                plan = until_answered(lambda: client.reading_plan(JOB, 1, 0))
                told = {span for answer in answers for span in answer.zero_weight}
                assert told <= set(plan.zero_weight), "what was told is in the plan from then on"
                number += 1
        entries = Lineage(job_store(job)).journal(1)
        assert len(entries) == 4 and {answer.shard for answer in answers if answer.action is Action.SKIP} == {
            f"t-{shard:08d}.tar" for shard in range(0, 8, 2)
        }
        assert {answer.action for answer in answers} == {Action.SKIP, Action.RETRY}
        with service.client() as client:
            assert {damage.journal_entry for damage in client.damages(JOB)} == {1, 2, 3, 4}


@pytest.mark.timeout(180)
def test_service_whose_database_is_deleted_answers_as_before(tmp_path):
    data = write_dataset(f"file://{tmp_path}/corpus")
    other = write_dataset(f"file://{tmp_path}/other", seed=2)
    with data_process(tmp_path) as service:
        recovery = {"on_bad_shard": "skip", "bad_shard_budget": 1.0}
        job = register_job(service.storage, f"{data}/train", more={"recovery": recovery})
        open_attempt(job)
        with service.client() as client:
            for name, url in (("web", data), ("web", other), ("news", other)):
                client.register(name, url)
        (tmp_path / "corpus/train/t-00000003.tar").unlink()
        with service.gang() as gang:
            gang.report_damage(JOB, 1, "t-00000003.tar", "missing", 1)
            plan = gang.reading_plan(JOB, 1, 3)
        with service.client() as client:
            damages = client.damages(JOB)
        before = everything(service)
        service.kill()
        for file in tmp_path.glob("data.sqlite*"):
            file.unlink()
        service.start()
        service.wait_ready()
        assert everything(service) == before and [len(versions) for versions in before.values()] == [1, 2]
        with service.gang() as gang, service.client() as client:
            assert gang.reading_plan(JOB, 1, 3) == plan
            assert client.damages(JOB) == damages and len(damages) == 1


@pytest.mark.timeout(180)
def test_service_told_to_end_finishes_what_it_answers_and_exits_with_0(tmp_path):
    data = write_dataset(f"file://{tmp_path}/corpus")
    with data_process(tmp_path) as service:
        answers: list[object] = []

        def register() -> None:
            with service.client() as client, suppress(Unavailable):
                answers.extend(client.register(f"set{n}", data, f"r{n}", timeout_s=3) for n in range(1000))

        worker = threading.Thread(target=register)
        worker.start()
        wait_until(lambda: answers, 60, "nothing was registered")
        assert service.end() == 0
        worker.join(90)
        stored = open_store(service.storage).list("registry/datasets/")
        assert len(answers) <= len(list(stored)) <= len(answers) + 1
