"""Commits killed at every operation, those on the database included, and commits of several services at once: one
checkpoint, whole, or none; also where the store would let a second manifest replace the first.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import a_draft, open_attempt, restores, write_parts
from support.dying import DyingStore, every_death
from support.weak_store import Overwriting

from phalanx.checkpoint.commits import Commits
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob
from phalanx.checkpoint.pruning import prune
from phalanx.checkpoint.retention import Policy
from phalanx.checkpoint.store import Database
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectStore
from phalanx.objects.memory import MemoryStore
from phalanx.rpc import AlreadyExists

pytestmark = pytest.mark.timeout(240)
NAME, REF = JobName("p", "j"), CheckpointRef(1, 5)


class NumberedDatabase:
    """A database whose transactions are operations of a store that dies at one of them."""

    def __init__(self, database: Database, store: DyingStore) -> None:
        self._database, self._store = database, store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._database, name)
        return lambda *args: self._store.run("database", name, lambda: method(*args))


@dataclass
class Life:
    """A service from its start to its end."""

    database: Database
    commits: Commits
    job: HostedJob

    @classmethod
    def of(cls, folder: Path, store: ObjectStore) -> Life:
        database = Database(f"sqlite:///{folder}/checkpoint.sqlite")
        used = NumberedDatabase(database, store) if isinstance(store, DyingStore) else database
        return cls(database, Commits(used, Holds()), HostedJob(NAME, store, Policy(), None))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("database")
    Database(f"sqlite:///{folder}/checkpoint.sqlite").close()
    return folder


def test_service_killed_at_any_operation_of_a_save_has_one_checkpoint_once_it_is_asked_again(
    tmp_path: Path, empty_database: Path
) -> None:
    """Case 1: begin and commit, database and storage. After each death the gang asks again, or is gone for good."""
    folder, outcomes, num_lives = tmp_path / "none", set(), 0

    def make(name: str) -> ObjectStore:
        nonlocal folder
        folder = tmp_path / name
        shutil.copytree(empty_database, folder)
        store = MemoryStore()
        open_attempt(store)
        return store

    def save(dying: ObjectStore) -> None:
        assert isinstance(dying, DyingStore)
        life = Life.of(folder, dying)
        try:
            life.commits.begin(life.job, REF)
            write_parts(dying.inner, REF, 2)  # the ranks live on
            life.commits.commit(life.job, a_draft(REF, 2), 30).result(60)
        finally:
            life.database.close()

    for where, store in every_death(make, save):
        num_lives += 1
        outcomes.add(bool(Lineage(store).checkpoints()))
        if num_lives % 2:
            ask_again(folder, store, where)
        else:
            go_on_without(store, where)
    assert outcomes == {False, True} and num_lives > 20


def ask_again(folder: Path, store: ObjectStore, where: str) -> None:
    life = Life.of(folder, store)
    life.commits.begin(life.job, REF)
    if not list(store.list(keys.parts(REF))):
        write_parts(store, REF, 2)
    done = life.commits.commit(life.job, a_draft(REF, 2), 30).result(60)
    assert done.manifest == Lineage(store).manifest(REF) and restores(store, REF), where
    assert life.database.saves(NAME) == {} and [*life.database.catalog(NAME)] == [REF], where
    life.database.close()


def go_on_without(store: ObjectStore, where: str) -> None:
    live = Lineage(store).checkpoints()
    assert open_attempt(store).parent == (live[-1] if live else None), where
    prune(store, Policy(), dry_run=False, grace_s=0)
    left = {keys.checkpoint_of(info.key) for info in store.list()} - {None}
    assert left == set(live) and all(restores(store, ref) for ref in live), where


@pytest.mark.parametrize("make_store", [MemoryStore, Overwriting])
def test_twenty_commits_by_two_services_at_once_make_one_manifest(
    make_store: type[MemoryStore], tmp_path: Path, empty_database: Path
) -> None:
    """Case 11: the database decides where the store does not; who brought another manifest is told."""
    shutil.copytree(empty_database, tmp_path / "db")
    watched = make_store()
    open_attempt(watched)
    write_parts(watched, REF, 2)
    lives = [Life.of(tmp_path / "db", watched) for _ in range(2)]
    start = threading.Barrier(20)

    def commit(number: int) -> tuple[int, Any]:
        life = lives[number % 2]
        start.wait()
        draft = replace(a_draft(REF, 2), schedule={"tokens": number % 2})
        try:
            return number % 2, life.commits.commit(life.job, draft, 30).result(60).manifest
        except AlreadyExists:
            return number % 2, None

    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(commit, range(20)))
    stored = Lineage(watched).manifest(REF)
    assert all(manifest in (None, stored) for _, manifest in told)
    winner = stored.schedule["tokens"]
    assert all(manifest == stored for number, manifest in told if number == winner)
    assert restores(watched, REF)


def test_commit_decided_before_a_kill_is_not_replaced_by_another_one_afterwards(
    tmp_path: Path, empty_database: Path
) -> None:
    """Case 11: killed between the database's decision and the put."""
    shutil.copytree(empty_database, tmp_path / "db")
    store = Overwriting()
    open_attempt(store)
    write_parts(store, REF, 2)
    life = Life.of(tmp_path / "db", store)
    life.database.decide(NAME, REF, "xxh3:" + "0" * 32)
    with pytest.raises(AlreadyExists, match=str(REF)):
        life.commits.commit(life.job, a_draft(REF, 2), 30).result(60)
    assert Lineage(store).checkpoints() == ()
