"""The small rooms: access table, messages, names, holds, pins and the database."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import IDENTITY, PLACEMENT

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as pb
from phalanx.checkpoint import wire
from phalanx.checkpoint.access import ACCESS
from phalanx.checkpoint.catalog import State, View
from phalanx.checkpoint.curator import Quiet
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.names import Selector, checkpoint_name, parse_selector
from phalanx.checkpoint.pins import PinDecision, PinLog, pinned
from phalanx.checkpoint.store import Database
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, LoaderState, Manifest
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store
from phalanx.rpc import Unavailable, access_problems
from phalanx.snapshot.draft_message import draft_message

JOB, REF = JobName("p", "j"), CheckpointRef(1, 5)
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def test_every_method_says_who_may_call_it():
    assert access_problems(ACCESS, [pb.DESCRIPTOR.services_by_name["CheckpointService"]]) == []


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)


METRICS = st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False), max_size=3)


@given(st.dictionaries(st.text(min_size=1), NUMBERS, max_size=5), st.integers(0, 2**40), st.booleans(), METRICS)
def test_a_draft_survives_its_message(schedule, position, speculative, metrics):
    loader, digests = LoaderState(7, position), (IDENTITY, PLACEMENT, IDENTITY, IDENTITY)
    draft = Manifest(3, 7, 2, *digests, loader, schedule, (), (), speculative, metrics)
    assert wire.from_draft(pb.ManifestDraft.FromString(draft_message(draft).SerializeToString())) == draft


@pytest.mark.parametrize("attempt, step", [(0, 1), (-1, 1), (1, -1), (10**8, 1)])
def test_a_checkpoint_that_cannot_be_is_refused(attempt, step):
    with pytest.raises(PhalanxError, match="ref"):
        wire.from_ref(pb.CheckpointRef(attempt=attempt, step=step))


def test_selectors_are_read_or_refused():
    assert parse_selector("latest") == Selector() and parse_selector("12") == Selector(step=12)
    assert parse_selector("a2-s12") == Selector(ref=CheckpointRef(2, 12))
    assert checkpoint_name(JOB, REF) == "projects/p/jobs/j/checkpoints/a1-s5"
    for wrong in ("", "newest", "a0-s1", "-1", "a1-s", "\u0661", "123456789"):
        with pytest.raises(PhalanxError):
            parse_selector(wrong)


def test_holds_keep_removals_out_and_removals_keep_holds_out():
    holds = Holds()
    with holds.hold(JOB, REF, "a reader"), holds.hold(JOB, REF, "another"):
        assert holds.of(JOB).keys() == {REF}
        with holds.removal(JOB, REF) as is_free:
            assert not is_free
        with holds.removal(JOB, CheckpointRef(1, 6)) as is_free:
            assert is_free
    assert holds.of(JOB) == {}
    with holds.removal(JOB, REF) as is_free:
        assert is_free
        with pytest.raises(Unavailable, match="being removed"), holds.hold(JOB, REF, "a reader"):
            pass
        with holds.removal(JOB, REF) as is_again:
            assert not is_again
    with holds.hold(JOB, REF, "a reader"):
        pass


def test_pins_follow_from_their_decisions_and_a_gap_or_a_foreign_object_is_damage():
    root = open_store("memory://")
    log = PinLog(root)
    first = PinDecision(1, "pin", 1, 5, "why", "r1", "me")
    assert log.create(JOB, first) and log.create(JOB, first)
    assert not log.create(JOB, PinDecision(1, "pin", 1, 6, "", "r2", "you"))
    assert log.create(JOB, PinDecision(2, "unpin", 1, 5, "", "r2", "me"))
    assert pinned(log.read(JOB)[:1]) == {REF: "why"} and pinned(log.read(JOB)) == {} and log.revision(JOB) == 2
    root.create("registry/pins/p/j/00000004.json", b"{}")
    with pytest.raises(DamagedObject, match="missing"):
        log.read(JOB)


def test_database_remembers_saves_entries_and_requests_across_openings(tmp_path):
    url = f"sqlite:///{tmp_path / 'x.sqlite'}"
    database = Database(url, "file:///a")
    database.set_save(JOB, REF, "begun")
    database.ask("r", {"kind": "prune"})
    database.close()
    database = Database(url, "file:///a")
    assert database.saves(JOB) == {REF: "begun"}
    known = database.asked("r")
    assert known is not None and known.asked == {"kind": "prune"} and known.answer is None
    database.answer("r", {"x": 1})
    entry = database.note(JOB, REF, 10, 2, NOW)
    assert database.note(JOB, REF, 99, 2, datetime.now(UTC)) == entry == database.catalog(JOB)[REF]
    assert database.saves(JOB) == {}
    database.drop(JOB, [REF])
    assert database.catalog(JOB) == {}
    database.close()
    other = Database(url, "file:///b")
    assert other.asked("r") is None
    other.close()


def test_database_that_fails_is_an_outside_error_and_a_wrong_url_the_users(tmp_path):
    with pytest.raises(OutsideError, match=r"database sqlite:.*unable to open"):
        Database(f"sqlite:///{tmp_path / 'no' / 'folder' / 'x.sqlite'}")
    with pytest.raises(PhalanxError, match=r"database\.url"):
        Database("nonsense")


def test_database_killed_in_its_first_start_starts_afterwards(tmp_path):
    path = tmp_path / "x.sqlite"
    program = (
        "import os, signal, sys, alembic.op as op\n"
        "made = op.create_table\n"
        "def create(*arguments, **more):\n"
        "    made(*arguments, **more)\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if arguments[0] == sys.argv[2] else None\n"
        "op.create_table = create\n"
        "from phalanx.checkpoint.store import Database\n"
        "Database('sqlite:///' + sys.argv[1])\n"
    )
    for table in ("saves", "catalog", "requests"):
        ended = subprocess.run([sys.executable, "-c", program, str(path), table], timeout=60)
        assert ended.returncode == -signal.SIGKILL
        with sqlite3.connect(path) as connection:
            assert connection.execute("select count(*) from sqlite_master").fetchone() == (0,)
    Database(f"sqlite:///{path}").close()


def test_a_quiet_job_is_looked_at_ever_less_often_until_something_changes():
    quiet, pauses = Quiet(), []
    view = View(REF, State.LIVE, None, 1, 1, NOW)
    for _ in range(7):
        quiet.saw((view,), is_idle=True)
        pauses.append(quiet.left)
    assert pauses == [0, 1, 3, 7, 15, 15, 15]
    quiet.saw((view,), is_idle=False)
    assert quiet.left == 0
    quiet.saw((view,), is_idle=True)
    quiet.saw((), is_idle=True)
    assert quiet.left == 0
