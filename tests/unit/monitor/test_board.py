"""The board: what records and events become, what is new for a watcher, and what a kill leaves."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.errors import OutsideError
from phalanx.monitor import board as board_module
from phalanx.monitor.attempts import AttemptFacts, layout_words
from phalanx.monitor.rules import Action, Policy
from phalanx.monitor.rules.gpu import GpuReading
from phalanx.monitor.store import MonitorStore, Position
from phalanx.monitor.testing import STEP_PARTS, Told, run_with_recovery, started, steps, tell_run
from phalanx.rpc import NotFound

JOB = "projects/p/jobs/run-1"


def ids(monitor):
    return [each.id.removeprefix(f"{JOB}/incidents/") for each in monitor.view.get_run(JOB).incidents]


def test_run_with_a_recovery_has_every_step_once_as_the_live_attempt_did_it(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    run = monitor.view.get_run(JOB)
    assert list(run.curve.step) == list(range(1, 501))
    assert list(run.curve.attempt) == [1] * 300 + [2] * 200
    assert [point.step for point in run.evaluations] == [100, 200, 300, 400, 500]
    assert (run.summary.step, run.summary.attempt, run.summary.state) == (500, 2, train_pb.JOB_STATE_RUNNING)
    assert run.summary.tokens_per_second == pytest.approx(131072)


def test_run_attempts_show_parents_checkpoints_and_the_live_chain(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    first, second = monitor.view.get_run(JOB).attempts
    assert (first.attempt, first.parent_attempt, list(first.checkpoints), first.last_step) == (
        1,
        0,
        [100, 200, 300],
        301,
    )
    assert (second.parent_attempt, second.parent_step, list(second.checkpoints)) == (1, 300, [400, 500])
    assert first.live and second.live


def test_run_incidents_are_those_of_rules_and_of_train_each_once(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    assert ids(monitor) == ["a1-nan-s301", "a1-node_loss-e7", "a2-straggler-s0-r3"]


def test_run_death_of_a_rank_and_the_end_of_its_attempt_are_one_incident(monitor):
    told = Told(JOB)
    cause = record_pb.Cause(kind=record_pb.CAUSE_KIND_PROCESS_DEATH, message="killed by SIGKILL", rank=1)
    died = [
        told.event("submitted", "queued"),
        *started(told),
        *steps(told, 1, 20),
        told.event("incident", "running", attempt=1, cause=cause, message="its peers are being ended"),
        told.event("recovering", "recovering", attempt=1, step=20, cause=cause, message="restart in place"),
    ]
    tell_run(monitor.board, died)
    (incident,) = monitor.view.get_run(JOB).incidents
    assert (incident.step, incident.cause.message) == (20, "killed by SIGKILL")


def test_run_ranks_have_place_section_busy_time_and_note(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    ranks = monitor.view.get_run(JOB).ranks
    assert [(rank.rank, rank.node_id, rank.phase, rank.step) for rank in ranks] == [
        (0, "node-a", "step", 501), (1, "node-a", "step", 501), (2, "node-b", "step", 501), (3, "node-b", "step", 501),
    ]  # fmt: skip
    assert ranks[3].busy_s > 0.85 and "rank 3 works" in ranks[3].note and ranks[0].note == ""
    assert all(rank.parts == STEP_PARTS for rank in ranks)


def test_verdict_that_train_tells_back_as_an_event_is_no_second_incident(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    monitor.board.observe(told.progress(1, None))
    cause = record_pb.Cause(kind=record_pb.CAUSE_KIND_NAN, message="not finite")
    own = f"{JOB}/incidents/a1-nan-s1"
    monitor.board.observe(told.event("incident", "running", attempt=1, step=1, cause=cause, request_id=own))
    monitor.board.observe(told.event("incident", "running", attempt=1, step=1, cause=cause, request_id="another"))
    assert ids(monitor) == ["a1-nan-s1"]


def test_end_of_an_attempt_that_a_verdict_asked_for_is_no_second_incident(monitor):
    told = Told(JOB)
    monitor.board.change(JOB, lambda run: run.set_spec(100, Policy(on_nan=Action.ROLL_BACK)))
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, (told.progress(step, None) for step in (1, 2, 3)))
    cause = record_pb.Cause(kind=record_pb.CAUSE_KIND_NAN, message="not finite")
    monitor.board.observe(told.event("recovering", "recovering", attempt=1, step=5, cause=cause))
    assert ids(monitor) == ["a1-nan-s1", "a1-nan-s2", "a1-nan-s3"]
    run = monitor.view.get_run(JOB)
    assert [each.action for each in run.incidents] == [1, 1, 3], "told twice, then rolled back"


def test_records_of_an_older_attempt_change_nothing(monitor):
    told = Told(JOB)
    tell_run(monitor.board, itertools.chain(started(told), steps(told, 1, 20), started(told, attempt=2, start_step=10)))
    told.attempt = 1
    tell_run(monitor.board, [told.progress(21, 1.0), told.progress(11, 1.0), told.phase("step", 30)])
    run = monitor.view.get_run(JOB)
    assert list(run.curve.step) == list(range(1, 11)) and run.summary.attempt == 2
    assert all(rank.step <= 11 for rank in run.ranks)


def test_rules_begin_again_behind_the_restart_of_an_attempt(monitor):
    """A spike in steps that are redone counts anew, under the new attempt's id."""
    told, noise = Told(JOB), random.Random(1)
    with_spike = [2.0 + noise.gauss(0, 0.01) for _ in range(200)] + [4.0] * 5
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, (told.progress(step, loss) for step, loss in enumerate(with_spike, 1)))
    tell_run(monitor.board, started(told, attempt=2, start_step=150))
    tell_run(monitor.board, (told.progress(step, with_spike[step - 1]) for step in range(151, 206)))
    assert ids(monitor) == ["a1-spike-s201", "a2-spike-s201"]


def test_policy_of_the_job_says_what_is_asked_for(monitor):
    told = Told(JOB)
    monitor.board.change(JOB, lambda run: run.set_spec(100, Policy(on_nan=Action.NOTIFY)))
    tell_run(monitor.board, started(told))
    monitor.board.observe(told.progress(1, None))
    assert monitor.view.get_run(JOB).incidents[0].action == train_pb.INCIDENT_ACTION_NOTIFY


def test_missed_records_are_counted_by_the_gap_and_told(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    told.number += 7
    assert monitor.board.observe(told.progress(1, 2.0)) == {JOB}
    told.number += 2
    assert monitor.board.observe(told.sign_of_life()) == {JOB}, "a sign of life names the last record there is"
    assert monitor.board.observe(told.sign_of_life()) == frozenset()
    assert monitor.view.get_run(JOB).num_missed_records == monitor.board.num_missed == 9


def test_another_log_begins_anew(monitor):
    told = Told(JOB)
    tell_run(monitor.board, itertools.chain(started(told), steps(told, 1, 5)))
    other = Told(JOB, log_id="log-2")
    other.revision = told.revision
    assert monitor.board.observe(other.progress(6, 2.0)) == {JOB}, "how many were lost with the old log is not known"
    assert monitor.board.position == Position("log-2", 1) and monitor.board.num_missed == 0


def test_killed_between_saves_everything_comes_again_from_the_saved_position(monitor):
    """Whatever moment the kill comes at: what train tells again behind the saved position gives the same run and the
    same incidents.
    """
    told = list(run_with_recovery(JOB, 60))
    tell_run(monitor.board, told)
    whole, found = monitor.view.get_run(JOB), ids(monitor)
    for cut in (0, 1, 37, len(told) // 2, len(told) - 1):
        again = type(monitor)(monitor.url.replace("monitor.sqlite", f"cut-{cut}.sqlite"))
        tell_run(again.board, told[:cut])
        again.board.save()
        tell_run(again.board, told[cut : cut + 100])  # not saved
        again.again()
        number = again.board.position.number
        assert number == cut
        tell_run(again.board, [each for each in told if each.number > number])
        run = again.view.get_run(JOB)
        assert run.curve == whole.curve and run.attempts == whole.attempts and run.events == whole.events
        assert ids(again) == found
        again.board.save()
        assert [each.id for each in again.store.incidents()] == [each.id for each in whole.incidents]


def test_restart_shows_the_same_run_from_the_database(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    before = monitor.view.get_run(JOB)
    monitor.board.save()
    after = monitor.again().view.get_run(JOB)
    for part in ("curve", "evaluations", "incidents", "events", "attempts"):
        assert getattr(after, part) == getattr(before, part), part
    assert after.version > before.version


def test_restart_knows_where_the_ranks_of_a_run_are(monitor):
    tell_run(monitor.board, started(Told(JOB)))
    monitor.board.save()
    monitor.again()
    assert monitor.board.jobs_on("node-b") == [JOB] and monitor.board.jobs_on("node-c") == []
    assert [rank.node_id for rank in monitor.view.get_run(JOB).ranks] == ["node-a"] * 2 + ["node-b"] * 2


def test_ranks_of_an_attempt_that_is_over_live_no_more(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    monitor.board.observe(told.event("succeeded", "succeeded", attempt=1))
    assert not any(rank.alive for rank in monitor.view.get_run(JOB).ranks)


def test_save_that_failed_is_made_up_for_by_the_next_one(monitor, monkeypatch):
    tell_run(monitor.board, run_with_recovery(JOB, 100))

    def fail(*_):
        raise OutsideError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(MonitorStore, "save", fail)
        with pytest.raises(OutsideError):
            monitor.board.save()
    assert monitor.board.save() == 3
    before = monitor.view.get_run(JOB)
    assert monitor.again().view.get_run(JOB).curve == before.curve


def test_incident_that_is_saved_already_is_not_new(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    monitor.board.observe(told.progress(1, None))
    assert monitor.board.save() == 1
    monitor.again()
    again = Told(JOB, log_id="another log")
    tell_run(monitor.board, started(again))
    monitor.board.observe(again.progress(1, None))
    assert monitor.board.save() == 0


def test_past_events_are_kept_and_nobody_is_told_of_them(monitor):
    cause = record_pb.Cause(kind=record_pb.CAUSE_KIND_OUT_OF_MEMORY, message="killed by the kernel")
    told = Told(JOB).event("recovering", "recovering", attempt=1, cause=cause)
    monitor.board.add_past(JOB, [told.event])
    monitor.board.save()
    assert ids(monitor) == ["a1-out_of_memory-e1"]
    assert monitor.store.unalerted() == [] and monitor.store.unreported() == []


def test_runs_heard_longest_ago_are_forgotten_and_their_incidents_stay(monitor):
    for index in range(4):
        told = Told(f"projects/p/jobs/run-{index}")
        monitor.board.observe(told.event("running", "running", attempt=1))
        monitor.board.observe(told.progress(1, None))
        monitor.board.save()
    monitor.board.prune(2)
    assert [run.job[-1] for run in monitor.view.list_runs().runs] == ["3", "2"]
    assert len(monitor.store.incidents()) == 4
    assert [run.job[-1] for run in monitor.again().view.list_runs().runs] == ["3", "2"]


def test_steps_of_many_runs_leave_memory_and_come_back(monitor, monkeypatch):
    monkeypatch.setattr(board_module, "MAX_LOADED", 2)
    jobs = [f"projects/p/jobs/run-{index}" for index in range(5)]
    for job in jobs:
        told = Told(job)
        tell_run(monitor.board, itertools.chain(started(told), steps(told, 1, 10)))
        monitor.board.save()
    loaded = [job for job in jobs if monitor.board.change(job, lambda run: run.loaded) is not None]
    assert len(loaded) <= 2
    assert all(list(monitor.view.get_run(job).curve.step) == list(range(1, 11)) for job in jobs)


def test_get_run_of_a_job_that_is_not_known_is_not_found(monitor):
    with pytest.raises(NotFound, match="list the runs"):
        monitor.view.get_run("projects/p/jobs/none")


def test_get_run_thins_and_continues_behind_a_step(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 500))
    assert len(monitor.view.get_run(JOB, max_points=50).curve.step) <= 50
    assert list(monitor.view.get_run(JOB, after_step=490).curve.step) == list(range(491, 501))


def test_watch_gives_what_is_new_and_rows_that_are_done_again(monitor):
    told = Told(JOB)
    tell_run(monitor.board, itertools.chain(started(told), steps(told, 1, 20)))
    ended = threading.Event()
    changes = monitor.view.watch_run(JOB, 0, ended)
    first = next(changes)
    assert list(first.curve.step) == list(range(1, 21)) and len(first.ranks) == 4
    tell_run(monitor.board, steps(told, 21, 23))
    second = next(changes)
    assert list(second.curve.step) == [21, 22, 23] and second.version > first.version and not second.events
    tell_run(monitor.board, itertools.chain(started(told, attempt=2, start_step=10), steps(told, 11, 12)))
    third = next(changes)
    assert list(third.curve.step) == [11, 12] and set(third.curve.attempt) == {2}
    assert [attempt.attempt for attempt in third.attempts] == [1, 2]
    ended.set()
    assert list(changes) == []


def test_watch_from_a_version_continues_there(monitor):
    told = Told(JOB)
    tell_run(monitor.board, itertools.chain(started(told), steps(told, 1, 20)))
    version = monitor.view.get_run(JOB).version
    tell_run(monitor.board, steps(told, 21, 22))
    change = next(monitor.view.watch_run(JOB, version))
    assert list(change.curve.step) == [21, 22] and not change.events


def test_watch_from_a_version_of_an_earlier_process_gets_everything(monitor):
    told = Told(JOB)
    tell_run(monitor.board, itertools.chain(started(told), steps(told, 1, 20)))
    version = monitor.view.get_run(JOB).version
    monitor.board.save()
    change = next(monitor.again().view.watch_run(JOB, version))
    assert list(change.curve.step) == list(range(1, 21)) and len(change.events) == 2


def test_watch_without_news_gives_a_sign_of_life(monitor, monkeypatch):
    monkeypatch.setattr("phalanx.monitor.view.SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr("phalanx.monitor.view._LOOK_S", 0.01)
    tell_run(monitor.board, started(Told(JOB)))
    changes = monitor.view.watch_run(JOB, 0)
    first, second = next(changes), next(changes)
    assert second.version == first.version and len(second.ranks) == 4


def test_gpu_faults_are_told_once_over_restarts(monitor):
    from phalanx.monitor.gpus import GpuBoard

    def put(xid):
        found = []
        GpuBoard(monitor.store, found.append).put("source", [GpuReading("node-a", 0, "GPU-1", xid=xid)], "1 GPU")
        return [fault.message for fault in found]

    assert put(0) == []
    assert len(put(79)) == 1
    assert put(79) == [] and put(79) == []


def test_gpus_of_a_source_that_went_away_stay_and_age(monitor):
    monitor.gpus.put("source", [GpuReading("b", 1, "GPU-2"), GpuReading("a", 0, "GPU-1", utilization=0.5)], "2 GPUs")
    monitor.gpus.put_failure("source", "away (Connection refused)")
    found = monitor.view.list_gpus()
    assert [gpu.node for gpu in found.gpus] == ["a", "b"] and found.gpus[0].utilization == 0.5
    assert not found.gpus[1].HasField("utilization")
    assert list(found.sources) == ["source: away (Connection refused)"]
    assert monitor.gpus.failures() == {"source": 1}


def test_layout_is_told_in_words():
    placement = {"parallel": {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}, "world_size": 4}
    assert layout_words(placement) == "4 ranks, dp_shard 2, pp 2"
    assert layout_words({}) == ""


def test_facts_of_storage_are_the_truth_about_attempts(monitor):
    tell_run(monitor.board, run_with_recovery(JOB, 100))
    facts = [AttemptFacts(1, checkpoints=(20, 40), layout="4 ranks"), AttemptFacts(2, 1, 40, layout="2 ranks")]
    monitor.board.change(JOB, lambda run: run.set_facts(facts))
    first, second = monitor.view.get_run(JOB).attempts
    assert list(first.checkpoints) == [20, 40] and (second.parent_step, second.layout) == (40, "2 ranks")
    assert second.last_step == 100
