"""Killed before or after any store operation, or overtaken by a zombie there: nothing half-written, and the next try
goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from lineage_kit import (
    IDENTITY,
    InterruptedStore,
    Killed,
    a_manifest,
    die,
    memory_store,
    open_next,
    step_rows,
    window_rows,
)

from phalanx.lineage import CheckpointRef, Lineage, live_chain
from phalanx.objects import ObjectStore

JOB = {"request_id": "r", "spec": {}, "identity": {"a": 1}, "identity_digest": IDENTITY}


def a_history(store: ObjectStore) -> Lineage:
    """Attempt 1 with two entries and checkpoints 5 and 10, then attempt 2 from (1, 5) with an entry and no
    checkpoint.
    """
    lineage = Lineage(store)
    open_next(lineage)
    lineage.append_journal(1, "damage", 3, {})
    lineage.append_journal(1, "damage", 4, {})
    lineage.commit(a_manifest(1, 5))
    lineage.commit(a_manifest(1, 10))
    open_next(lineage, avoid=(CheckpointRef(1, 10),))
    lineage.append_journal(2, "damage", 5, {})
    return lineage


def put_records(lineage: Lineage) -> object:
    return lineage.records.put(2, 0, 6, 10, window_rows([6], [20]), step_rows([6]))


ACTIONS: dict[str, Callable[[Lineage], object]] = {
    "create_job": lambda lineage: lineage.create_job(**JOB),
    "open_attempt": open_next,
    "append_journal": lambda lineage: lineage.append_journal(2, "damage", 6, {}, request_id="again"),
    "put_records": put_records,
    "commit": lambda lineage: lineage.commit(a_manifest(2, 10)),
}


def whole_state(lineage: Lineage) -> tuple[object, ...]:
    """Reads and checks every decision in the store."""
    attempts = lineage.attempts()
    assert lineage.chain() == live_chain(attempts)
    manifests = tuple(lineage.manifest(ref) for ref in lineage.checkpoints())
    journals = tuple(lineage.journal(attempt.number) for attempt in attempts)
    return lineage.read_job(), len(attempts), manifests, tuple(len(journal) for journal in journals)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("action", ACTIONS)
def test_action_killed_at_any_operation_leaves_all_or_nothing_and_can_be_repeated(action, after):
    untouched = whole_state(a_history(memory_store()))
    done_store = memory_store()
    a_history(done_store)
    ACTIONS[action](Lineage(done_store))
    done = whole_state(Lineage(done_store))
    for at in itertools.count():
        store = memory_store()
        a_history(store)
        dying = InterruptedStore(store, at, die, after)
        try:
            ACTIONS[action](Lineage(dying))
        except Killed:
            pass
        else:
            break
        lineage = Lineage(store)
        left = whole_state(lineage)
        assert left in (untouched, done)
        ACTIONS[action](lineage)
        if action == "open_attempt" and left == done:
            assert [attempt.number for attempt in lineage.attempts()] == [1, 2, 3, 4]
        else:
            assert whole_state(lineage) == done
    assert at == dying.operations > 0


def test_zombies_that_write_at_any_operation_of_an_opening_never_become_live():
    """Checkpoint case 14."""
    for at in itertools.count():
        store = memory_store()
        zombie = a_history(store)

        def write(zombie: Lineage = zombie) -> None:
            for attempt in (1, 2):
                zombie.append_journal(attempt, "damage", 9, {})
                zombie.commit(a_manifest(attempt, 20))

        interrupted = InterruptedStore(store, at, write)
        attempt = open_next(Lineage(interrupted))
        if not interrupted.happened:
            break
        lineage = Lineage(store)
        live, journal = lineage.checkpoints(), lineage.journal(attempt.number)
        assert live[-1] == attempt.parent
        assert attempt.parent in (CheckpointRef(1, 5), CheckpointRef(2, 20))
        assert CheckpointRef(1, 20) not in live
        assert [entry.position for entry in journal if entry.attempt == 1] == [3, 4]
        zombie.commit(a_manifest(2, 30))
        zombie.append_journal(2, "damage", 11, {})
        assert (lineage.checkpoints(), lineage.journal(attempt.number)) == (live, journal)
    assert at > 5


def test_opening_overtaken_at_any_operation_reads_anew_and_takes_the_next_number():
    for at in itertools.count():
        store = memory_store()
        other = a_history(store)

        def overtake(other: Lineage = other) -> None:
            other.commit(a_manifest(open_next(other).number, 10))

        interrupted = InterruptedStore(store, at, overtake)
        attempt = open_next(Lineage(interrupted))
        if not interrupted.happened:
            break
        assert (attempt.number, attempt.parent) == (4, CheckpointRef(3, 10))
        assert Lineage(store).checkpoints() == (CheckpointRef(1, 5), CheckpointRef(3, 10))
    assert at > 5
