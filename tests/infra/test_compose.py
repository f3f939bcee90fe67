"""compose/, started for real: every image built, a job run to its end on S3 over gRPC while a service is killed."""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.docker import COMPOSE, Stack, engine, stack

pytestmark = pytest.mark.timeout(2400)  # of the first one, which builds the images
PROCESSES = ("data", "train", "checkpoint", "monitor", "agent")
TEXT = 'phalanx data prepare "$(python -c "import asyncio, os; print(os.path.dirname(asyncio.__file__))")"'
PREPARE = f"{TEXT} --out s3://phalanx/datasets/python --vocab-size 1024 --held-out-fraction 0.1"
KILL = """
import os, pathlib, signal, sys
for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if each.read_bytes().split(b"\\0")[1:3] == [b"-m", sys.argv[1].encode()]:
        os.kill(int(each.parent.name), signal.SIGKILL)
"""
SHOWN = ("phalanx_run_loss", "phalanx_run_tokens_per_second", "phalanx_run_step_time_seconds", "phalanx_train_jobs")


@pytest.fixture(scope="module")
def running(compose: list[str]) -> Iterator[Stack]:
    """All containers, healthy."""
    with engine() as environ, stack(environ, compose) as started:
        yield started


@pytest.fixture(scope="module")
def finished(running: Stack) -> dict[str, Any]:
    """The job of compose/jobs, submitted, and run to its end although train was killed meanwhile."""
    running.cli("sh", "-c", PREPARE)
    running.cli("phalanx", "job", "submit", "job.toml")
    wait_until(lambda: shown(running)["state"] == "running", 120)
    running.inside("train", "python", "-c", KILL, "phalanx.train")
    running.cli("phalanx", "job", "wait", "first", "--timeout", "240", timeout_s=300)
    return shown(running)


def wait_until(holds: Callable[[], bool], deadline_s: float) -> None:
    """Looks again and again; fails at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {deadline_s} s"
        time.sleep(0.5)


def shown(running: Stack) -> dict[str, Any]:
    """The job as the service tells it."""
    told: dict[str, Any] = json.loads(running.cli("phalanx", "job", "show", "first", "--json"))
    return told


def asked(running: Stack, query: str) -> list[dict[str, Any]]:
    """What Prometheus answers."""
    url = f"http://{running.address('prometheus', 9090)}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        told = json.load(answer)
    assert told["status"] == "success", told
    found: list[dict[str, Any]] = told["data"]["result"]
    return found


def test_every_process_is_healthy_and_scraped(running):
    states = {name: each["State"] for name, each in running.inspect().items()}
    assert all(states[name]["Health"]["Status"] == "healthy" for name in (*PROCESSES, "store", "prometheus"))
    assert states["init"]["ExitCode"] == 0
    wait_until(lambda: len(asked(running, 'up{job="phalanx"} == 1')) == len(PROCESSES), 60)


def test_images_hold_torch_only_where_ranks_run(running):
    found = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    assert {name: running.inside(name, "python", "-c", found).strip() for name in PROCESSES} == {
        **dict.fromkeys(PROCESSES, "False"),
        "agent": "True",
    }
    assert running.inside("agent", "python", "-c", "import torch; print(torch.ones(2).sum().item())").strip() == "2.0"


def test_containers_are_users_without_rights_on_a_read_only_root(running):
    for name, each in running.inspect().items():
        host = each["HostConfig"]
        assert each["Config"]["User"] not in ("", "root", "0"), name
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Memory"] > 0, name


def test_job_runs_to_its_end_on_s3_though_train_is_killed(running, finished):
    assert finished["state"] == "succeeded" and running.inspect()["train"]["RestartCount"] == 1
    proof = json.loads(running.cli("phalanx", "data", "verify", "job.toml", "--json"))
    assert proof["ok"] and proof["steps"] == 30 and proof["windows"] == 240
    assert json.loads(running.cli("phalanx", "checkpoint", "ls", "job.toml", "--json"))


def test_boards_ask_what_prometheus_has(running, finished):
    wait_until(lambda: all(asked(running, name) for name in SHOWN), 60)
    answered = 0
    for board in sorted((COMPOSE / "grafana" / "boards").glob("*.json")):
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$job", ".*").replace("$__rate_interval", "10m")
                answered += bool(asked(running, query))
    assert answered >= 14
    jobs = asked(running, "phalanx_run_loss")
    assert [each["metric"]["job"] for each in jobs] == ["projects/default/jobs/first"]


def test_prometheus_accepts_its_rules(running):
    checked = running.inside("prometheus", "promtool", "check", "config", "/etc/phalanx/prometheus.yaml")
    assert "3 rules found" in checked


def test_page_asks_for_its_password(running):
    url = f"http://{running.address('monitor', 7701)}/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=10)
    password = running.cli("cat", "/run/phalanx/page-password").strip()
    basic = base64.b64encode(f"me:{password}".encode()).decode()
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Basic {basic}"})) as page:
        assert page.status == 200 and b"<html" in page.read().lower()


def test_secrets_stay_with_their_holders_and_out_of_environments_and_logs(running, finished):
    held = {name: set(running.inside(name, "ls", "/run/phalanx").split()) for name in PROCESSES}
    common = {"ca.crt", "token", "token.pub", "aws-credentials"}
    own = {name: {f"{name}.crt", f"{name}.key"} for name in PROCESSES}
    more = {"train": {"token.key"}, "monitor": {"page-password"}}
    assert held == {name: common | own[name] | more.get(name, set()) for name in PROCESSES}
    secrets = [running.inside(name, "cat", "/run/phalanx/token").strip() for name in PROCESSES]
    credentials = running.inside("agent", "cat", "/run/phalanx/aws-credentials")
    secrets += re.findall(r"secret_access_key = (\S+)", credentials)
    told = json.dumps(running.inspect()) + running.compose("logs", "--no-color")
    assert len(secrets) == 6 and not [secret for secret in secrets if secret in told]


def test_ended_and_started_again_everything_is_still_there(running, finished):
    running.docker("rm", "--force", running.cli_name)
    running.compose("down", "--timeout", "20")
    running.compose("up", "--detach", "--wait")
    running.start_cli()
    assert shown(running)["revision"] == finished["revision"]
