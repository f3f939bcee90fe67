"""Reports to train and alerts to people: tried until they are done, each once."""

from __future__ import annotations

import threading
import time

import pytest

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.errors import PhalanxError
from phalanx.monitor.alerts import Alerts, Webhook, body, line
from phalanx.monitor.incident import incident_of
from phalanx.monitor.reporter import Reporter
from phalanx.monitor.rules import Action, Kind, Verdict
from phalanx.monitor.store import Position
from phalanx.rpc import FailedPrecondition, Unavailable

JOB = "projects/p/jobs/run-1"


def incident(step=7, message="loss 5 against a median\nof 2"):
    return incident_of(JOB, Verdict(Kind.SPIKE, 2, step, step + 2, message, step), Action.SKIP, 1_000_000_000)


class Train:
    """Answers as it is told: an error, or what is done."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    def ReportIncident(self, request, *, timeout):  # noqa: N802
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


NOTED = train_pb.ReportIncidentResponse(action=train_pb.INCIDENT_ACTION_SKIP)


def run(monitor, train, until, alerts=None):
    outcomes = []
    reporter = Reporter(monitor.store, train, alerts or Alerts(), outcomes.append)
    reporter.start()
    end_s = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    reporter.close()
    return outcomes


def test_reporter_tries_until_train_answers_and_keeps_the_outcome(monitor, monkeypatch):
    monkeypatch.setattr("phalanx.monitor.reporter.FIRST_PAUSE_S", 0.01)
    monitor.store.save(Position(), [], [(incident(), False)])
    train = Train(Unavailable("gone"), Unavailable("gone"), NOTED)
    outcomes = run(monitor, train, lambda: not monitor.store.unreported())
    assert len({request.request_id for request in train.requests}) == 1 and len(train.requests) == 3
    assert (train.requests[0].first_step, train.requests[0].last_step) == (7, 9)
    assert [each.outcome for each in outcomes] == ["skip"] == [monitor.store.incidents()[0].outcome]


def test_reporter_takes_a_refusal_for_an_answer(monitor):
    monitor.store.save(Position(), [], [(incident(), False)])
    refusal = FailedPrecondition("attempt", value=2, expected="the newest one", remedy="none is needed")
    run(monitor, Train(refusal), lambda: not monitor.store.unreported())
    assert monitor.store.incidents()[0].outcome.startswith("refused by train: attempt is 2")


def test_incident_of_no_job_is_told_to_people_alone(monitor):
    verdict = Verdict(Kind.GPU_FAULT, 0, 0, 0, "XID 79", 0, None, "node-a", "GPU-1-xid79")
    monitor.store.save(Position(), [], [(incident_of("", verdict, Action.NOTIFY, 0), False)])
    train = Train(NOTED)
    run(monitor, train, lambda: not monitor.store.unalerted())
    assert train.requests == []


def test_reporter_tells_people_of_each_incident_once_over_restarts(monitor, caplog):
    monitor.store.save(Position(), [], [(incident(7), False), (incident(20), False)])
    for _ in range(2):
        run(monitor, Train(NOTED), lambda: not monitor.store.unalerted())
    told = [record.message for record in caplog.records if record.name == "phalanx.monitor.incidents"]
    assert len(told) == 2


def test_alert_is_one_line_that_says_what_where_and_what_is_asked():
    assert line(incident()) == (
        f"incident {JOB}/incidents/a2-spike-s7: spike in {JOB} attempt 2 step 7: "
        "loss 5 against a median of 2; asks for skip"
    )
    assert b'"kind": "spike"' in body(incident()) and b'"rank": null' in body(incident())


def test_webhook_that_never_answers_ends_by_its_deadline():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        hook = Webhook.read(write(f"http://127.0.0.1:{server.getsockname()[1]}/"))
        began_s = time.monotonic()
        with pytest.raises(Exception, match="the webhook does not answer"):
            hook.post(b"{}", deadline_s=0.3)
        assert time.monotonic() - began_s < 3.0


def test_webhook_gives_up_after_its_tries_and_counts(monkeypatch):
    monkeypatch.setattr("phalanx.monitor.alerts.MAX_TRIES", 1)
    alerts = Alerts(Webhook.read(write("http://127.0.0.1:1/")))
    assert alerts.tell(incident(), threading.Event())
    assert (alerts.num_posted, alerts.num_failed) == (0, 1)


def write(text):
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "webhook"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["", "ftp://somewhere/", "not a url"])
def test_webhook_file_without_a_url_is_an_error_that_does_not_show_it(text):
    with pytest.raises(PhalanxError, match="http"):
        Webhook.read(write(text))


def test_webhook_shows_its_url_nowhere():
    assert "secret" not in repr(Webhook.read(write("https://hooks.example/secret")))


def test_long_ids_stay_apart_and_within_what_train_takes():
    job = f"projects/{'p' * 63}/jobs/{'j' * 63}"
    found = {Verdict(Kind.GPU_FAULT, 1, 0, 0, "", 0, None, "", f"GPU-{'0' * 36}-xid{xid}").id(job) for xid in (48, 79)}
    assert len(found) == 2 and all(len(each) <= 200 for each in found)
