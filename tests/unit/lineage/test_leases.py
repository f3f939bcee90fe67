"""Leases: who reads a checkpoint keeps it, whoever is killed where; no clock of another machine is asked."""

from __future__ import annotations

import logging
import threading

import pytest
from support.checkpoints import open_attempt, save

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, keys, leases
from phalanx.lineage.lease_book import EXPIRY_S, LeaseBook
from phalanx.lineage.leases import BeingRemoved, CheckpointRemoved, Lease, leased, may_remove, removal_mark
from phalanx.objects import StoreDenied, StoreError, open_store
from phalanx.objects.faults import Fault, FaultyStore, fail_after, fail_before, number_is, on

REF, OTHER = CheckpointRef(1, 2), CheckpointRef(1, 4)


class Clock:
    """A clock that a test turns."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Died(Exception):
    """The reader's process ended here."""


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    root = open_store("memory://") if request.param == "memory" else open_store(f"file://{tmp_path}")
    job = root.within("projects/p/jobs/j")
    open_attempt(job)
    save(job, REF)
    save(job, OTHER)
    return job


def lease_keys(store):
    return [info.key for info in store.list(keys.LEASES)]


def test_lease_shows_its_checkpoint_and_purpose_and_ends_with_its_block(store):
    book = LeaseBook(store)
    with leased(store, REF, "export"), leased(store, REF, "verify"):
        assert book.readers().keys() == {REF} and book.readers_of(OTHER) is None
        assert {key.split("/")[3].split("-")[0] for key in lease_keys(store)} == {"export", "verify"}
    assert book.readers() == {} and lease_keys(store) == []


def test_lease_ends_where_its_reader_fails(store):
    with pytest.raises(ZeroDivisionError), leased(store, REF, "export"):
        raise ZeroDivisionError
    assert lease_keys(store) == []


def test_lease_renews_itself_and_leaves_one_object(store):
    renewed = threading.Event()
    third = Fault(on("create", "/00000003.json"), after=lambda _: renewed.set())
    with leased(FaultyStore(store, [third]), REF, "export", renew_s=0.001):
        assert renewed.wait(30)
    assert lease_keys(store) == []
    lease = Lease(store, REF, "export")
    for number in (1, 2, 3):
        lease.renew()
        assert lease_keys(store) == [keys.lease(REF, lease.name, number)]
    lease.end()
    lease.renew()
    assert lease_keys(store) == []


def test_book_takes_a_lease_for_ended_only_once_nothing_of_it_changed_for_the_expiry(store):
    """Case 4: by the collector's own clock alone; a reader that lives is never taken for dead."""
    clock = Clock()
    book, lease = LeaseBook(store, clock=clock), Lease(store, REF, "export")
    lease.renew()
    for _ in range(5):
        clock.now_s += EXPIRY_S - 1
        assert book.readers_of(REF) is not None and book.sweep() == 0
        lease.renew()
    clock.now_s += EXPIRY_S  # the look before saw an older number, so this one is a change
    assert book.readers_of(REF) == lease.name
    clock.now_s += EXPIRY_S
    assert book.readers_of(REF) is None
    lease.renew()
    assert book.readers_of(REF) == lease.name
    clock.now_s += EXPIRY_S
    assert book.sweep() == 1 and lease_keys(store) == []


def test_book_of_a_collector_that_starts_anew_gives_every_lease_its_time(store):
    lease = Lease(store, REF, "export")
    lease.renew()
    clock = Clock()
    clock.now_s = 1e9
    book = LeaseBook(store, clock=clock)
    assert book.readers_of(REF) == lease.name
    clock.now_s += EXPIRY_S
    assert book.readers_of(REF) is None


@pytest.mark.parametrize("died", [fail_before, fail_after], ids=["before", "after"])
def test_lease_whose_reader_is_killed_at_any_operation_expires_and_is_swept(store, died):
    """Case 4: every storage operation of a reader's life is numbered; killed at any, it blocks no removal for ever."""
    for number in range(40):
        inner = FaultyStore(store, [died(number_is(number), Died())])
        is_killed = False
        try:
            lease = Lease(inner, REF, "export")
            lease.renew()
            lease.renew()
            lease.end()
        except Died:
            is_killed = True
        clock = Clock()
        book = LeaseBook(store, clock=clock)
        assert len(book.readers()) <= 1
        clock.now_s = EXPIRY_S
        assert book.readers() == {}
        book.sweep()
        assert lease_keys(store) == []
        if not is_killed:
            assert number > 3
            return
    raise AssertionError("no reader went through")


def test_lease_on_a_checkpoint_that_is_being_removed_is_refused_by_name(store, monkeypatch):
    """Case 4, 15: the mark comes first and lives, so the reader gives way; taken back, it reads."""
    monkeypatch.setattr(leases, "MARK_RENEW_S", 0.01)
    monkeypatch.setattr(leases, "PATIENCE_S", 0.3)
    with removal_mark(store, REF) as mark:
        assert LeaseBook(store).readers() == {} and may_remove(mark)
        with pytest.raises(BeingRemoved, match=r"attempt 1 step 2 .*being removed"), leased(store, REF, "export"):
            raise AssertionError("the block must not begin")
        with leased(store, OTHER, "export"):
            pass
    with leased(store, REF, "export"):
        pass
    assert lease_keys(store) == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_reader_waits_for_a_removal_that_is_under_way(store, is_taken):
    """Case 4, 15: it reads what the removal leaves after all, and is told of what it took."""
    mark = Lease(store, REF, "removal")
    mark.renew()

    def ends(_):
        if is_taken:
            store.delete(keys.manifest(REF))
        mark.end()

    watched = FaultyStore(store, [Fault(on("list", nth=1), before=ends)])
    is_reading = False
    try:
        with leased(watched, REF, "export"):
            is_reading = True
    except BeingRemoved:
        assert is_taken
    assert is_reading is not is_taken and lease_keys(store) == []


def test_mark_of_a_removal_that_was_killed_keeps_no_reader_out(store, monkeypatch, caplog):
    """Case 4: killed between its mark and the manifest; no collector has to come first."""
    monkeypatch.setattr(leases, "MARK_EXPIRY_S", 0.3)
    mark = Lease(store, REF, "removal")
    mark.renew()
    with caplog.at_level(logging.WARNING), leased(store, REF, "export"):
        assert LeaseBook(store).readers_of(REF) is not None
    assert "marked by a removal that ended" in caplog.text
    assert lease_keys(store) == [keys.lease(REF, mark.name, 1)]


def test_removal_that_stood_still_finds_that_its_mark_may_be_taken_for_left_behind(store, monkeypatch):
    with removal_mark(store, REF) as mark:
        assert may_remove(mark)
        monkeypatch.setattr(leases, "MARK_EXPIRY_S", 0.0)
        assert not may_remove(mark)


def test_lease_and_mark_see_each_other_whichever_operation_comes_between(store, monkeypatch):
    """Case 4, 15: a removal that begins between any two storage operations of a reader's start; one of them gives
    way.
    """
    monkeypatch.setattr(leases, "PATIENCE_S", 0.0)
    for number in range(3):
        seen = []

        def remove(_, seen=seen):
            mark = Lease(store, REF, "removal")
            mark.renew()
            seen.append(LeaseBook(store).readers_of(REF))
            seen.append(mark)

        inner = FaultyStore(store, [Fault(number_is(number), before=remove)])
        try:
            with leased(inner, REF, "export"):
                is_reading = True
        except PhalanxError:
            is_reading = False
        assert not is_reading or seen[0] is not None
        seen[1].end()


def test_reader_whose_checkpoint_was_removed_nonetheless_is_told(store):
    """Case 4: a reader that was stopped for longer than the expiry never takes what it read for whole."""
    with pytest.raises(CheckpointRemoved, match="removed while it was read"), leased(store, REF, "export"):
        store.delete(keys.manifest(REF))
    with pytest.raises(CheckpointRemoved) as told, leased(store, OTHER, "export"):
        store.delete(keys.manifest(OTHER))
        raise ZeroDivisionError
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_reader_of_a_checkpoint_without_a_manifest_meets_its_own_error(store):
    with pytest.raises(ZeroDivisionError), leased(store, CheckpointRef(1, 9), "verify"):
        raise ZeroDivisionError


def test_reader_that_may_not_write_goes_on_with_a_warning(store, caplog):
    denied = StoreDenied("bucket", expected="a key that may write", remedy="ask")
    with caplog.at_level(logging.WARNING), leased(FaultyStore(store, [fail_before(on("create"), denied)]), REF, "x"):
        assert lease_keys(store) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "without a lease" in caplog.text


def test_lease_that_cannot_be_renewed_for_a_while_goes_on(store, caplog):
    renewed = threading.Event()
    faults = [
        fail_before(on("create", nth=1), StoreError("away")),
        Fault(on("create", "/00000002.json", nth=1), after=lambda _: renewed.set()),
    ]
    with leased(FaultyStore(store, faults), REF, "export", renew_s=0.001):
        assert renewed.wait(30)
    assert "was not renewed: away" in caplog.text and lease_keys(store) == []


def test_purpose_of_a_lease_is_one_word():
    with pytest.raises(ValueError, match="lower-case"):
        Lease(open_store("memory://"), REF, "Look at it")
