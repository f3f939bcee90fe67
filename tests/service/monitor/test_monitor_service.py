"""The monitor as a process: it hears train, keeps what it heard through SIGKILL, reports each verdict once."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from monitor_kit import follow_in_thread, serve_train, wait_until
from support.jobs import JOB as JOB_FILE

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.step_parts import Part
from phalanx.lineage import Lineage, StepRows
from phalanx.lineage.events import EventLog, EventType, JobEvent, JobState
from phalanx.lineage.registry import RegisteredJob, Registry
from phalanx.monitor.access import ACCESS
from phalanx.monitor.testing import Told, run_with_recovery, started, steps
from phalanx.objects import open_store
from phalanx.rpc import Database, Denied, NotFound, Role, access_problems, write_config
from phalanx.spec import parse_job
from phalanx.spec.job import plain

JOB = "projects/p/jobs/run-1"
OURS = {f"{JOB}/incidents/a1-nan-s301", f"{JOB}/incidents/a2-straggler-s0-r3"}


def step_of(monitor, job=JOB):
    with monitor.client() as client:
        found = {run.job: run for run in client.runs()}
        return found[job].step if job in found else 0


def test_access_table_names_every_method():
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    from phalanx.api.monitor.v1 import monitor_service_pb2

    modules = (monitor_service_pb2, logs_service_pb2, metrics_service_pb2, trace_service_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    assert access_problems(ACCESS, services) == []


def test_monitor_hears_a_run_and_reports_its_verdicts_to_train(make_monitor, train):
    monitor = make_monitor(services={"train": train.address})
    train.tell(run_with_recovery(JOB, 500))
    wait_until(lambda: step_of(monitor) == 500, "all steps heard")
    wait_until(lambda: {each.request_id for each in train.reports} == OURS, "verdicts reported")
    with monitor.client() as client:
        run = client.run(JOB, max_points=100)
        assert len(run.curve.step) <= 100 and run.curve.step[-1] == 500
        wait_until(lambda: all(each.outcome for each in client.incidents(JOB)), "outcomes known")
        assert [each.outcome for each in client.incidents()] == ["notify: noted", "a new attempt", "notify: noted"]
    nan = next(each for each in train.reports if "nan" in each.request_id)
    assert (nan.attempt, nan.first_step, nan.last_step, nan.action) == (1, 301, 301, train_pb.INCIDENT_ACTION_SKIP)
    figures = monitor.figures()
    assert f'phalanx_run_step{{job="{JOB}"}} 500.0' in figures
    assert f'phalanx_run_incidents_total{{job="{JOB}",kind="nan"}} 1.0' in figures
    assert monitor.text().count(f"incident {JOB}/incidents/a1-nan-s301:") == 1
    assert monitor.end() == 0


def test_monitor_killed_in_a_run_misses_nothing_and_alarms_once(make_monitor, train):
    monitor = make_monitor(services={"train": train.address})
    told = list(run_with_recovery(JOB, 500))
    for part in range(0, len(told), len(told) // 5):
        train.tell(told[part : part + len(told) // 5])
        if part:
            monitor.kill()
            monitor.start()
    wait_until(lambda: step_of(monitor) == 500, "all steps heard")
    wait_until(lambda: {each.request_id for each in train.reports} == OURS, "verdicts reported")
    with monitor.client() as client:
        run = client.whole_run(JOB)
        wait_until(lambda: all(each.outcome for each in client.incidents(JOB)), "outcomes known")
        assert len(client.incidents()) == 3
    assert list(run.curve.step) == list(range(1, 501)) and run.num_missed_records == 0
    assert list(run.curve.attempt) == [1] * 300 + [2] * 200


def test_monitor_killed_between_verdict_and_report_reports_after_its_return(make_monitor, train):
    train.is_down = True
    monitor = make_monitor(services={"train": train.address})
    told = Told(JOB)
    train.tell([*started(told), told.progress(1, None)])

    def is_saved():
        with monitor.client() as client:
            return [each.id for each in client.incidents()]

    wait_until(is_saved, "the incident is saved")
    monitor.kill()
    train.is_down = False
    monitor.start()
    wait_until(lambda: train.reports, "reported")
    with monitor.client() as client:
        wait_until(lambda: client.incidents()[0].outcome == "notify: noted", "outcome kept")


def test_monitor_follows_train_through_its_restart_and_counts_what_is_gone(make_monitor, train, cluster):
    monitor = make_monitor(services={"train": train.address})
    told = Told(JOB)
    train.tell([*started(told), *steps(told, 1, 10)])
    wait_until(lambda: step_of(monitor) == 10, "steps heard")
    other = type(train)("log-2")
    after = Told(JOB, "log-2", number=40)  # 40 records are not kept any more
    after.revision = told.revision
    other.tell(steps(after, 15, 20))
    with serve_train(cluster, other) as server:
        monitor.end()
        monitor.config = replace(monitor.config, services={"train": server.address})
        monitor.start()
        wait_until(lambda: step_of(monitor) == 20, "steps of the new log heard")
    with monitor.client() as client:
        run = client.whole_run(JOB)
    assert list(run.curve.step) == [*range(1, 11), *range(15, 21)] and run.num_missed_records == 40


def job_in_storage(folder):
    """A registered job, and the URL of the cluster's root."""
    url = f"file://{folder}/store"
    text = JOB_FILE.format(folder=folder.as_uri(), data="file:///none", steps=40, nproc=2, metrics=folder / "metrics")
    registered = RegisteredJob("p", "tiny", url, plain(parse_job(tomllib.loads(text))), "request-1", "somebody")
    Registry(open_store(url)).create_job(registered)
    return url, registered


def test_monitor_watch_goes_on_through_its_own_restart(make_monitor, train):
    monitor = make_monitor(services={"train": train.address})
    told = Told(JOB)
    train.tell([*started(told), *steps(told, 1, 10)])
    wait_until(lambda: step_of(monitor) == 10, "steps heard")
    stop = threading.Event()
    with monitor.client() as client:
        found = follow_in_thread(client, JOB, 0, stop)
        assert list(found.get(timeout=10).curve.step)[:3] == [1, 2, 3]
        monitor.kill()
        monitor.start()
        train.tell(steps(told, 11, 12))
        seen: set[int] = set()
        wait_until(lambda: seen.update(found.get(timeout=20).curve.step) or {11, 12} <= seen, "new steps seen")
        stop.set()


def test_monitor_tells_of_a_hang_by_records_of_all_ranks(make_monitor, train):
    """Thirty short steps teach the rule; then rank 2 stays in a section that may take 10 s, and 5 s of patience."""
    make_monitor(services={"train": train.address})
    told = Told(JOB)
    train.tell([*started(told), *steps(told, 1, 30)])
    train.tell(told.phase("step", 32, rank) for rank in (0, 1, 3))
    wait_until(lambda: train.reports, "a hang is reported", 40.0)
    assert [each.request_id for each in train.reports] == [f"{JOB}/incidents/a1-hang-s31-r2-step"]
    assert train.reports[0].action == train_pb.INCIDENT_ACTION_RESTART
    assert train.reports[0].cause.node_id == "node-b"


def test_monitor_stopped_for_longer_than_a_section_may_take_tells_of_no_hang(make_monitor, train):
    monitor = make_monitor(services={"train": train.address})
    told = Told(JOB)
    train.tell([*started(told), *steps(told, 1, 30)])
    wait_until(lambda: step_of(monitor) == 30, "steps heard")
    monitor.signal(signal.SIGSTOP)
    threading.Event().wait(17.0)  # the very time of which the rule must not speak
    train.tell(steps(told, 31, 33))
    monitor.signal(signal.SIGCONT)
    wait_until(lambda: step_of(monitor) == 33, "steps heard")
    assert train.reports == []


def test_monitor_tells_no_hang_of_a_node_that_train_does_not_hear(make_monitor, train):
    train.heard = ["node-a"]
    monitor = make_monitor(services={"train": train.address})
    told = Told(JOB)
    train.tell([*started(told), *steps(told, 1, 30)])
    wait_until(lambda: step_of(monitor) == 30, "steps heard")
    threading.Event().wait(17.0)  # longer than the section may take
    assert train.reports == []


def test_monitor_posts_incidents_to_a_webhook_and_counts_what_it_does_not_take(make_monitor, train, hook, tmp_path):
    (tmp_path / "webhook").write_text(hook.url + "\n")
    hook.status = 503
    monitor = make_monitor(services={"train": train.address}, options={"webhook": str(tmp_path / "webhook")})
    told = Told(JOB)
    train.tell([*started(told), told.progress(1, None)])
    wait_until(lambda: "the webhook answers 503" in monitor.text(), "a first try")
    hook.status = 200
    wait_until(lambda: hook.posts, "posted")
    assert hook.posts[0]["id"] == f"{JOB}/incidents/a1-nan-s1" and hook.posts[0]["path"] == "/hook?token=secret"
    wait_until(lambda: "phalanx_monitor_webhook_posts_total 1.0" in monitor.figures(), "counted")
    wait_until(lambda: hook.posts[0]["id"] in monitor.alerted(), "noted: from here on a kill tells nobody twice")
    monitor.kill()
    monitor.start()
    train.tell([told.progress(2, 2.0), told.progress(3, None)])
    wait_until(lambda: len(hook.posts) == 2, "posted")
    assert [post["step"] for post in hook.posts] == [1, 3], "the first one is not posted again"
    assert "secret" not in monitor.text()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dcgm": "http://host/metrics"}, "options.dcgm"),
        ({"webhook": "/nowhere/webhook"}, "/nowhere/webhook"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_monitor_with_a_wrong_option_says_so_in_one_line(cluster, tmp_path, options, what):
    path = tmp_path / "monitor.toml"
    database = Database(f"sqlite:///{tmp_path}/m.sqlite")
    write_config(path, cluster.service("monitor", database=database, options=options))
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.monitor", "--config", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and what in done.stderr.splitlines()[-1], done.stderr


def test_monitor_shows_callers_what_lies_in_their_scope(make_monitor, train):
    monitor = make_monitor(services={"train": train.address})
    other = "projects/q/jobs/run-2"
    first, second = Told(JOB), Told(other)
    train.tell(started(first))
    second.number = first.number
    train.tell(started(second))
    wait_until(lambda: monitor.figures().count("phalanx_run_attempt{") == 2, "both heard")
    with monitor.client(project="q") as client:
        assert [run.job for run in client.runs()] == [other]
        assert client.run(other).summary.job == other
        with pytest.raises(Denied):
            client.run(JOB)
    with monitor.client(Role.AGENT) as client, pytest.raises(Denied):
        client.runs()
    with monitor.client() as client, pytest.raises(NotFound):
        client.run("projects/p/jobs/none")


def test_monitor_fills_a_run_from_storage_when_its_database_is_lost(make_monitor, tmp_path):
    url, registered = job_in_storage(tmp_path)
    store = registered.store()
    lineage = Lineage(store)
    fill_lineage(lineage)
    log = EventLog(store)
    kinds = [(EventType.SUBMITTED, JobState.QUEUED), (EventType.STARTING, JobState.STARTING)]
    for number, (kind, state) in enumerate(kinds, 1):
        log.append(JobEvent(number, kind, state, "2026-01-01T00:00:00+00:00", f"w{number}", attempt=number - 1))
    monitor = make_monitor(storage=url)
    name = str(registered.name)
    wait_until(lambda: step_of(monitor, name) == 40, "filled")
    with monitor.client() as client:
        run = client.whole_run(name)
    assert list(run.curve.step) == list(range(1, 41))
    assert list(run.curve.attempt) == [1] * 20 + [2] * 20, "what attempt 1 did after its child began is not live"
    assert [(each.attempt, list(each.checkpoints)) for each in run.attempts] == [(1, [20, 30]), (2, [40])]
    assert (run.summary.saves.attempt, run.summary.saves.step) == (2, 40)
    assert len(run.events) == 2 and run.summary.num_steps == registered.job.training.steps


def fill_lineage(lineage):
    """Attempt 1 does 1 to 30 with a checkpoint at 20; attempt 2 goes on from there to 40; then 1 commits 30."""
    from phalanx.core.digest import xxh3
    from phalanx.lineage.values import LoaderState, Manifest

    digest = xxh3(b"x")

    def rows(first, last, loss):
        num = last - first + 1
        columns = {name: np.full(num, 1.0) for name in ("gradient_norm", "step_time_s", *Part)}
        return StepRows(
            step=np.arange(first, last + 1), loss=np.full(num, loss), valid_tokens=np.full(num, 100), **columns
        )

    def commit(attempt, step, records):
        lineage.commit(
            Manifest(attempt, step, 1, digest, digest, digest, digest, LoaderState(step, step * 2), {}, (records,), ())
        )

    for attempt, first, last in ((1, 1, 20), (2, 21, 40)):
        lineage.open_attempt(code_digest=digest, identity_digest=digest, placement={"world_size": 2})
        commit(attempt, last, lineage.records.put(attempt, 0, first, last, None, rows(first, last, 2.0)))
        if attempt == 1:
            left = lineage.records.put(1, 0, 21, 30, None, rows(21, 30, 9.0))
    commit(1, 30, left)


def test_monitor_keeps_many_jobs_apart(make_monitor, train):
    monitor = make_monitor(services={"train": train.address})
    number, jobs = 0, [f"projects/p/jobs/run-{index}" for index in range(20)]
    for job in jobs:
        told = Told(job, number=number)
        train.tell(itertools.chain(started(told), steps(told, 1, 5)))
        number = told.number
    wait_until(lambda: all(step_of(monitor, job) == 5 for job in jobs), "all heard")
