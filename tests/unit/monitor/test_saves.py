"""What is saved of a run: the newest checkpoint and its age, bytes, stall, saves left out, damaged and pinned ones."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime

import pytest

from phalanx.checkpoint.client import Listing, State, View
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef
from phalanx.monitor.attempts import AttemptFacts, Saved, last_steps, newest_checkpoint, with_checkpoints
from phalanx.monitor.messages import saves_message
from phalanx.monitor.stocktaking import UNWATCHED_S, WATCHED_S, Stocktaking
from phalanx.monitor.testing import Told, run_with_recovery, started, tell_run

JOB = "projects/p/jobs/run-1"
SECOND_NS = 1_000_000_000


def saved(step, *, attempt=1, damaged=False, pinned=False, num_bytes=10, created_ns=0):
    return Saved(attempt, step, damaged, pinned, num_bytes, created_ns)


def test_newest_checkpoint_is_live_and_not_damaged():
    """What an attempt commits behind the point where the next one went on does not count, nor what is damaged."""
    attempts = {
        1: AttemptFacts(1, checkpoints=(5, 10, 15), damaged=(10,)),
        2: AttemptFacts(2, 1, 5),
        3: AttemptFacts(3, 1, 5, checkpoints=(), damaged=()),
    }
    assert last_steps(attempts) == {3: float("inf"), 1: 5}
    assert newest_checkpoint(attempts) == (1, 5)
    attempts[3] = AttemptFacts(3, 1, 5, checkpoints=(10, 15), damaged=(15,))
    assert newest_checkpoint(attempts) == (3, 10)
    assert newest_checkpoint({1: AttemptFacts(1)}) is None


def test_checkpoints_of_the_service_replace_what_was_told_and_keep_when_it_was():
    told = AttemptFacts(1, checkpoints=(2, 4), saved_step=4, saved_ns=7, stall_s=0.5)
    found = with_checkpoints(told, [saved(4, created_ns=9, num_bytes=40), saved(3, pinned=True)])
    assert (found.checkpoints, found.pinned, found.damaged) == ((3, 4), (3,), ())
    assert (found.saved_step, found.saved_ns, found.saved_bytes, found.stall_s) == (4, 7, 40, 0.5)
    older = with_checkpoints(found, [saved(3, created_ns=5, num_bytes=30), saved(4, damaged=True)])
    assert (older.saved_step, older.saved_ns, older.saved_bytes) == (3, 5, 30)
    none = with_checkpoints(older, [])
    assert (none.checkpoints, none.saved_step, none.saved_ns, none.saved_bytes) == ((), 0, 0, 0)


def test_saves_of_a_run_tell_age_bytes_stall_and_how_many_were_left_out():
    facts = AttemptFacts(
        1, checkpoints=(4,), saved_step=4, saved_ns=10 * SECOND_NS, saved_bytes=99, stall_s=0.5, num_skipped=2
    )
    later = AttemptFacts(2, 1, 4, stall_s=0.25, num_skipped=1)
    saves = saves_message({1: facts, 2: later}, 14 * SECOND_NS)
    assert (saves.attempt, saves.step, saves.age_s, saves.num_bytes) == (1, 4, 4.0, 99)
    assert (saves.stall_s, saves.num_skipped) == (0.25, 3)
    assert saves_message({1: facts}, 0).age_s == 0.0, "the clock of whoever told may be ahead"
    assert saves_message({1: AttemptFacts(1)}, 0) is None
    unknown = saves_message({1: AttemptFacts(1, checkpoints=(4,))}, 0)
    assert unknown.step == 4 and not any(map(unknown.HasField, ("age_s", "num_bytes", "stall_s")))


def test_run_that_saves_tells_it_and_so_does_a_monitor_that_was_killed(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, told.saved(10, 0.25))
    tell_run(monitor.board, told.saved(20, None, num_skipped=1))
    tell_run(monitor.board, told.saved(30, 0.125, num_skipped=1))
    monitor.board.change(JOB, lambda run: run.set_checkpoints([saved(10, pinned=True), saved(30, num_bytes=1 << 30)]))
    monitor.board.save()
    for board in (monitor, monitor.again()):
        run = board.view.get_run(JOB)
        saves = run.summary.saves
        assert (saves.attempt, saves.step, saves.num_bytes) == (1, 30, 1 << 30)
        assert (saves.stall_s, saves.num_skipped) == (0.125, 1)
        assert 0 <= saves.age_s < 60
        (attempt,) = run.attempts
        assert (list(attempt.checkpoints), list(attempt.pinned), list(attempt.damaged)) == ([10, 30], [10], [])
        assert board.view.list_runs().runs[0].saves.step == 30


def test_attempts_stored_before_there_were_saves_are_read(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    monitor.board.save()
    old = [{name: asdict(AttemptFacts(1))[name] for name in ("number", "last_step", "checkpoints", "layout")}]
    with monitor.store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE runs SET attempts = ?", (json.dumps(old),))
    assert not monitor.again().view.get_run(JOB).summary.HasField("saves")


class Service:
    """A checkpoint service that answers what it is told to; meanwhile: done while it is being asked."""

    def __init__(self, *views):
        self.views, self.asked, self.meanwhile = views, [], lambda: None

    def list(self, job, *, include_dead):
        assert include_dead
        self.asked.append(job)
        self.meanwhile()
        return Listing(tuple(self.views), 0)


def view(step, state=State.LIVE, *, attempt=1, pinned=None, num_bytes=7):
    created = None if state == State.OPEN else datetime.fromtimestamp(step, UTC)
    return View(CheckpointRef(attempt, step), state, pinned, num_bytes, 2, created)


def test_stocktaking_brings_states_pins_and_bytes_to_the_run(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    service = Service(
        view(100, pinned="to keep"),
        view(200, State.DAMAGED),
        view(300, State.DEAD),
        view(500, attempt=2, num_bytes=70),
        view(600, State.OPEN, attempt=2),
    )
    Stocktaking(monitor.board, service).ask(JOB)
    run = monitor.view.get_run(JOB)
    first, second = run.attempts
    assert list(first.checkpoints) == [100, 200, 300] and list(second.checkpoints) == [500]
    assert (list(first.damaged), list(first.pinned)) == ([200], [100])
    assert (run.summary.saves.step, run.summary.saves.num_bytes) == (500, 70)


def test_stocktaking_overtaken_by_a_commit_is_done_again(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, told.saved(10))
    service = Service(view(10))
    service.meanwhile = lambda: tell_run(monitor.board, told.saved(20))
    stock = Stocktaking(monitor.board, service)
    stock.ask(JOB)
    assert list(monitor.view.get_run(JOB).attempts[0].checkpoints) == [10, 20]
    service.meanwhile = lambda: None
    assert JOB in stock.due(time.monotonic()), "still to be asked"
    service.views = (view(10), view(20))
    stock.ask(JOB)
    assert monitor.view.get_run(JOB).summary.saves.num_bytes == 7


def test_stocktaking_asks_often_for_what_is_looked_at_and_seldom_for_what_is_not(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    stock = Stocktaking(monitor.board, Service())
    now_s = time.monotonic()
    assert stock.due(now_s) == []
    stock.on_told(told.event("committed", "running", attempt=1, step=10))
    assert stock.due(now_s) == [JOB]
    stock._asked_s[JOB] = now_s
    assert stock.due(now_s + UNWATCHED_S / 2) == [] and stock.due(now_s + UNWATCHED_S) == [JOB]
    monitor.view.get_run(JOB)
    assert stock.due(now_s + WATCHED_S) == [JOB]


def test_stocktaking_while_the_service_is_away_leaves_what_was_told(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, told.saved(10))
    service = Service()

    def fail():
        raise OutsideError("away")

    service.meanwhile = fail
    with pytest.raises(OutsideError):
        Stocktaking(monitor.board, service).ask(JOB)
    assert monitor.view.get_run(JOB).summary.saves.step == 10
