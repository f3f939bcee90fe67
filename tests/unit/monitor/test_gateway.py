"""The page's HTTP over answers of a test: routes, refusals, streams."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import resources

import pytest

from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor import web
from phalanx.monitor.web.gateway import MAX_STREAMS, Page
from phalanx.rpc import NotFound

JOB = "projects/p/jobs/j"
DEADLINE_S = 20.0


class Answers:
    """What the page asks. tick: set by a test for each change of the run; fail: raised by the list of runs."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.tick, self.fail = threading.Semaphore(0), None
        self.num_open = 0

    def list_runs(self) -> pb.ListRunsResponse:
        if self.fail is not None:
            raise self.fail
        return pb.ListRunsResponse(runs=[pb.RunSummary(job=JOB, step=5)])

    def get_run(self, job: str, max_points: int) -> pb.GetRunResponse:
        if job != JOB:
            raise NotFound("job", value=job, expected="one that is known", remedy="list them")
        return pb.GetRunResponse(version=max_points)

    def watch_run(self, job: str, after_version: int) -> Iterator[pb.WatchRunResponse]:
        self.get_run(job, 0)
        self.asked.append((job, after_version))
        self.num_open += 1
        try:
            version = after_version
            while True:
                version += 1
                yield pb.WatchRunResponse(version=version)
                self.tick.acquire(timeout=DEADLINE_S)
        finally:
            self.num_open -= 1

    def list_gpus(self) -> pb.ListGpusResponse:
        return pb.ListGpusResponse(sources=["none"])


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def page(answers: Answers) -> Iterator[Page]:
    with closing(Page(answers, "127.0.0.1:0")) as page:
        yield page
        for _ in range(1000):
            answers.tick.release()


Asked = tuple[int, dict[str, str], bytes]


def ask(page: Page, path: str, **headers: str) -> Asked:
    with closing(http.client.HTTPConnection(page.address, timeout=DEADLINE_S)) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def stream(page: Page, query: str, **headers: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(page.address, timeout=DEADLINE_S)
    connection.request(
        "GET", f"/api/watch?{query}", headers={key.replace("_", "-"): value for key, value in headers.items()}
    )
    return connection, connection.getresponse()


def message(answer: http.client.HTTPResponse) -> tuple[str, dict[str, object]]:
    id_, data, end = (answer.readline().decode().strip() for _ in range(3))
    assert end == ""
    return id_.removeprefix("id: "), json.loads(data.removeprefix("data: "))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/assets/page.js", "text/javascript"),
        ("/assets/style.css", "text/css"),
        ("/assets/icon.svg", "image/svg+xml"),
    ],
)
def test_gateway_asked_for_a_file_sends_it_under_a_strict_policy(page, path, kind):
    status, headers, body = ask(page, path)
    assert status == 200 and body
    assert headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/assets/gateway.py", "/assets/../gateway.py", "/../../etc/passwd", "/assets/", "/x", "/api/x"]
)
def test_gateway_asked_for_what_is_no_file_of_the_page_says_not_found(page, path):
    assert ask(page, path)[0] == 404


def test_gateway_files_name_no_other_host(page):
    for name in ("", *(f"assets/{each.name}" for each in resources.files(web).joinpath("assets").iterdir())):
        body = ask(page, f"/{name}")[2].decode()
        assert "://" not in body.replace("http://www.w3.org/2000/svg", ""), name


def test_gateway_answers_as_json(page):
    assert json.loads(ask(page, "/api/runs")[2])["runs"][0]["job"] == JOB
    assert json.loads(ask(page, "/api/gpus")[2])["sources"] == ["none"]
    assert json.loads(ask(page, f"/api/run?job={JOB}&max_points=7")[2])["version"] == 7


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run", 400),
        (f"/api/run?job={JOB}&max_points=-1", 400),
        (f"/api/run?job={JOB}&max_points=x", 400),
        ("/api/run?job=other", 404),
        ("/api/watch", 400),
        ("/api/watch?job=other", 404),
    ],
)
def test_gateway_asked_wrongly_says_what_is_wrong_in_one_line(page, path, status):
    got, headers, body = ask(page, path)
    assert got == status and headers["Content-Type"].startswith("application/json")
    assert "\n" not in json.loads(body)["error"]


def test_gateway_of_a_database_that_is_away_says_unavailable(page, answers):
    answers.fail = OutsideError("the database does not answer")
    status, _, body = ask(page, "/api/runs")
    assert status == 503 and "does not answer" in json.loads(body)["error"]


def test_gateway_whose_own_code_fails_logs_it_and_goes_on(page, answers, caplog):
    answers.fail = ValueError("a bug")
    with caplog.at_level(logging.ERROR), pytest.raises(http.client.HTTPException):
        ask(page, "/api/runs")
    assert "a request of the page failed" in caplog.text
    answers.fail = None
    assert ask(page, "/api/runs")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil:1"])
def test_gateway_asked_under_a_foreign_name_refuses(page, host):
    status, _, body = ask(page, "/api/runs", Host=host)
    assert status == 403 and b"own address" in body


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1", "[::1]:8080"])
def test_gateway_asked_under_a_name_of_its_own_answers(page, host):
    assert ask(page, "/api/runs", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_gateway_asked_to_write_refuses(page, method):
    with closing(http.client.HTTPConnection(page.address, timeout=DEADLINE_S)) as connection:
        connection.request(method, "/api/runs")
        assert connection.getresponse().status == 501


def test_stream_sends_each_change_with_its_version(page, answers):
    connection, answer = stream(page, f"job={JOB}&after=41")
    with closing(connection):
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert message(answer)[0] == "42"
        answers.tick.release()
        id_, data = message(answer)
        assert id_ == "43" and data["version"] == 43
    assert answers.asked == [(JOB, 41)]


def test_stream_of_a_browser_that_comes_back_goes_on_behind_what_it_had(page, answers):
    connection, answer = stream(page, f"job={JOB}&after=1", Last_Event_ID="57")
    with closing(connection):
        assert message(answer)[0] == "58"


def test_streams_beyond_the_limit_are_refused_and_a_freed_one_is_had_again(page, answers):
    with ExitStack() as open_:
        opened = []
        for _ in range(MAX_STREAMS):
            connection, answer = stream(page, f"job={JOB}")
            open_.enter_context(closing(connection))
            message(answer)
            opened.append((connection, answer))
        status, _, body = ask(page, f"/api/watch?job={JOB}")
        assert status == 429 and str(MAX_STREAMS).encode() in body
        assert ask(page, "/api/runs")[0] == 200, "all else is answered"
        opened[0][1].close()
        opened[0][0].close()
        wait_for(lambda: answers.tick.release() or answers.num_open < MAX_STREAMS)
        connection, answer = stream(page, f"job={JOB}")
        open_.enter_context(closing(connection))
        assert answer.status == 200


def test_page_beyond_loopback_without_a_password_is_refused(answers):
    with pytest.raises(PhalanxError, match=r"options\.page_password"):
        Page(answers, "0.0.0.0:0")


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_page_whose_password_cannot_be_had_is_refused(answers, tmp_path, content):
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PhalanxError, match="password"):
        Page(answers, "0.0.0.0:0", file)


def test_page_beyond_loopback_answers_only_who_knows_the_password(answers, tmp_path):
    (tmp_path / "password").write_text("sésame:1\n")
    with closing(Page(answers, "0.0.0.0:0", tmp_path / "password")) as page:
        basic = [base64.b64encode(f"any:{each}".encode()).decode() for each in ("sésame:1", "sésame", "")]
        statuses = [ask(page, "/api/runs", Authorization=f"Basic {each}")[0] for each in basic]
        assert statuses == [200, 401, 401]
        for wrong in ("Basic !", "Bearer x", "", f"Digest {basic[0]}"):
            status, headers, _ = ask(page, "/", Authorization=wrong)
            assert status == 401 and headers["WWW-Authenticate"].startswith("Basic")
        assert "sésame" not in repr(page)


def test_page_at_a_taken_port_says_so(page, answers):
    with pytest.raises(PhalanxError, match=r"options\.page"):
        Page(answers, page.address)


def wait_for(holds: Callable[[], bool]) -> None:
    limit = threading.Event()
    for _ in range(400):
        if holds():
            return
        limit.wait(0.05)
    raise AssertionError("it does not come")
