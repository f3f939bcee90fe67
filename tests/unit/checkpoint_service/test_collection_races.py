"""The collector killed at every storage operation, and readers, pins, forks and commits that come between any two of
them (cases 4 and 15).
"""

from __future__ import annotations

import threading
import uuid
from contextlib import ExitStack, suppress
from functools import cache

import pytest
from support.checkpoints import a_draft, open_attempt, restores, save, write_parts
from support.dying import DyingStore, Killed

from phalanx.checkpoint.collection import Collector
from phalanx.checkpoint.commits import Commits
from phalanx.checkpoint.facts import Decision, Policy
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob
from phalanx.checkpoint.looking import Looker
from phalanx.checkpoint.store import Database
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.lineage.lease_book import EXPIRY_S
from phalanx.lineage.leases import Lease, leased
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store
from phalanx.objects.faults import Fault, FaultyStore, delay, number_is, on

GRACE_S, PATIENCE_S = 50.0, 60.0  # a grace below the expiry of a lease: a reader that lives need not renew in it
POLICY = Policy(keep_latest=1, keep_best=1, best_by="validation_loss", healthy_steps=4)
NAME = JobName("p", "j")
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("no_patience")]


class Clock:
    """A clock that a test turns."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def ref(step, attempt=2):
    return CheckpointRef(attempt, step)


def fresh():
    return open_store(f"memory://{uuid.uuid4().hex}").within("projects/p/jobs/j")


@cache
def template():
    """Regular checkpoints at 2, 6, 10; speculative ones at 4 (healthy by now) and 8; the best is 2, the newest 10, 6
    has gone its time; 12 is half written, and an older attempt left 3 behind.
    """
    store = fresh()
    open_attempt(store)
    write_parts(store, ref(3, 1), 2, ranks=[1])
    open_attempt(store)
    for step in range(2, 11, 2):
        metrics = {"validation_loss": 1.0 if step == 2 else 2.0}
        save(store, ref(step), first_step=step - 1, loss=2.0, speculative=step in (4, 8), metrics=metrics)
    write_parts(store, ref(12), 2, ranks=[1])
    return tuple((info.key, store.read(info.key)) for info in store.list())


def history():
    """A job of its own that is as `template` says."""
    store = fresh()
    for key, data in template():
        store.create(key, data)
    return store


def collector(store, clock, grace_s=GRACE_S, pinned=None):
    looker = Looker(store, clock=clock)
    pins = {} if pinned is None else pinned

    def look():
        known = dict(pins)
        return looker.look(POLICY, pinned=known, stamp=lambda found: (found, len(known)))

    return Collector(
        store, look, lambda: (looker.stamp(), len(pins)), grace_s=grace_s, clock=clock, leases=looker.leases
    )


def pass_and_again(store, grace_s=GRACE_S):
    """Two passes with a grace between them."""
    clock = Clock()
    worker = collector(store, clock, grace_s)
    worker.collect()
    clock.now_s += max(GRACE_S, EXPIRY_S)
    worker.collect()


def steps_of(store):
    return {found.step for found in Lineage(store).checkpoints()}


def record_steps(store):
    return sorted(step for windows, _ in Lineage(store).records.live() for step in windows.step.tolist())


def deaths():
    """Every operation of two passes at which to die; after it too where it changes something."""
    watched = FaultyStore(history())
    pass_and_again(watched)
    for call in sorted(watched.calls, key=lambda call: call.number):
        yield call.number, False
        if call.operation in ("create", "delete"):
            yield call.number, True


def test_collector_killed_at_every_operation_keeps_what_is_needed_and_the_next_one_ends_the_work():
    """Cases 4, 15: at each of its storage operations, those of promotions and leases included."""
    num_deaths = 0
    for at, after in deaths():
        store = history()
        dying = DyingStore(store, at, after=after)
        with suppress(Killed):
            pass_and_again(dying)
        found = steps_of(store)
        assert {2, 4, 8, 10} <= found, (at, found)  # the best, the healthy one, the next in line, the newest
        assert 6 not in found or restores(store, ref(6)), at
        assert any(store.list(keys.parts(ref(12)))), at
        assert any(store.list(keys.promoted(ref(4)))) or 6 in found, (at, "something went before the promotion stood")
        pass_and_again(store)
        assert steps_of(store) == {2, 4, 8, 10}, at
        left = {keys.checkpoint_of(info.key) for info in store.list("a000") if not keys.retired_ref(info.key)}
        assert left - {None} == {ref(step) for step in (2, 4, 8, 10, 12)}, at
        assert list(store.list(keys.LEASES)) == [], at
        num_deaths += 1
    assert all(restores(store, ref(step)) for step in (2, 4, 8, 10)) and record_steps(store) == list(range(1, 11))
    assert num_deaths > 60, num_deaths


def test_reader_that_comes_between_any_two_operations_of_the_collector_reads_to_its_end():
    """Cases 4, 15: for each k, a reader that begins before operation k of a pass either reads the whole checkpoint, or
    is told at its start.
    """
    read = refused = 0
    for number in range(400):
        store = history()
        clock = Clock()
        with ExitStack() as reading:
            readers = []

            def begin(_, store=store, reading=reading, readers=readers):
                try:
                    reading.enter_context(leased(store, ref(6), "export"))
                except PhalanxError:
                    return
                readers.append(any(store.list(keys.manifest(ref(6)))))

            watched = FaultyStore(store, [Fault(number_is(number), before=begin)])
            worker = collector(watched, clock)
            worker.collect()
            clock.now_s = GRACE_S
            worker.collect()
            if readers and readers[0]:
                assert restores(store, ref(6))
                read += 1
            refused += not readers
        if len(watched.calls) <= number:
            assert read > 20
            return
    raise AssertionError("no pass went through")


def test_pin_that_comes_between_any_two_operations_of_the_collector_holds_or_is_refused():
    """Cases 4, 15: a pin is written under a lease; for each k the pass either sees it, or the pinner was refused or
    finds the checkpoint gone before it pins.
    """
    for number in range(400):
        store, clock, pinned = history(), Clock(), {}

        def pin(_, store=store, pinned=pinned):
            try:
                with leased(store, ref(6), "pin"):
                    if any(store.list(keys.manifest(ref(6)))):
                        pinned[ref(6)] = "for the paper"
            except PhalanxError:
                return

        watched = FaultyStore(store, [Fault(number_is(number), before=pin)])
        worker = collector(watched, clock, pinned=pinned)
        worker.collect()
        clock.now_s = GRACE_S
        worker.collect()
        assert not pinned or restores(store, ref(6))
        if len(watched.calls) <= number:
            return
    raise AssertionError("no pass went through")


def test_checkpoint_that_is_read_stays_until_its_reader_ends_or_is_dead_for_the_expiry():
    """Case 4: what is being read is spared, by a reader in another process too; a killed one blocks
    nothing for ever.
    """
    store, clock = history(), Clock()
    worker = collector(store, clock, grace_s=0.0)
    lease = Lease(store, ref(6), "export")
    lease.renew()
    report = worker.collect()
    kept = {decision.ref.step: decision.why for decision in report.kept}
    assert kept[6].startswith("in use: lease export-") and 6 in steps_of(store)
    for _ in range(3):
        clock.now_s += EXPIRY_S - 1
        lease.renew()
        worker.collect()
        assert restores(store, ref(6))
    clock.now_s += EXPIRY_S  # it was killed: nothing of it changes any more
    worker.collect()
    clock.now_s += EXPIRY_S
    worker.collect()
    assert 6 not in steps_of(store) and list(store.list(keys.LEASES)) == []


def test_operator_cannot_delete_what_is_being_read():
    store, clock = history(), Clock()
    worker = collector(store, clock)
    looker = Looker(store)
    outlook = looker.look(POLICY, pinned={}, stamp=lambda found: (found, 0))
    with leased(store, ref(6), "export"):
        assert worker.remove_now(Decision(ref(6), False, "asked"), outlook) is None
        assert restores(store, ref(6))
    assert worker.remove_now(Decision(ref(6), False, "asked"), outlook) is not None
    assert 6 not in steps_of(store)


def test_commit_goes_through_while_a_collection_stands_still(tmp_path):
    """Case 15: the collector is off the save path: it holds no lock that a commit could need."""
    inner = history()
    go, stands = threading.Event(), threading.Event()

    def wait():
        stands.set()
        return go.wait(PATIENCE_S)

    slow = FaultyStore(inner, [delay(on("delete", nth=0), wait)])
    worker = collector(slow, Clock(), grace_s=0.0)
    collecting = threading.Thread(target=worker.collect, daemon=True)
    collecting.start()
    assert stands.wait(PATIENCE_S)
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite'}", "memory://")
    try:
        commits = Commits(database, Holds())
        job = HostedJob(NAME, inner, POLICY, None)
        write_parts(inner, ref(12), 2, ranks=[0], first_step=11)
        commits.begin(job, ref(12))
        commits.commit(job, a_draft(ref(12), 2), PATIENCE_S).result(PATIENCE_S)
        assert collecting.is_alive() and restores(inner, ref(12))
    finally:
        go.set()
        collecting.join(PATIENCE_S)
        database.close()
    assert restores(inner, ref(12))
