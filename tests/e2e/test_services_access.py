"""Who may call: whoever may not is refused in one clear line, on record in the service's log and counted."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.jobs import run_cli, wait_until, write_job
from support.services import Services, resized, services

from phalanx import Client
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceStub
from phalanx.checkpoint.client import connect_checkpoint
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.client import connect_data
from phalanx.lineage import CheckpointRef
from phalanx.rpc import Credentials, Denied, read_client, read_service, write_config
from phalanx.rpc.pki import open_authority
from phalanx.rpc.tokens import Authority, Role, write_token
from phalanx.train.client import connect_train

pytestmark = pytest.mark.timeout(300)  # `phalanx up` of the module counts to its first test

NAME = "projects/default/jobs/guarded"


@pytest.fixture(scope="module")
def shared(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Services with one job, which waits for slots."""
    folder = Path(tmp_path_factory.mktemp("up"))
    with services(folder / "home", "--no-agent") as running:
        path = resized(write_job(folder, corpus), name="guarded")
        with running.client() as client:
            client.submit(path)
        yield running


@dataclass
class Watched:
    """One service's record of refusals, from now on."""

    running: Services
    name: str

    def __post_init__(self) -> None:
        self.log = self.running.home.log(self.name)
        self.metrics = read_service(self.running.home.config(self.name)).metrics
        self.offset, self.before = self.log.stat().st_size, self.count()

    def count(self) -> float:
        """How many refusals /metrics tells."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("phalanx_rpc_refusals_total"))

    def audited(self) -> list[dict[str, Any]]:
        """The lines written since."""
        with self.log.open() as log:
            log.seek(self.offset)
            return [json.loads(line[line.index("{") :]) for line in log if '"audit": "refused"' in line]

    def await_refusal(self, method: str, why: str, subject: str = "") -> dict[str, Any]:
        """The one line on record, which must say so; and the figure that counts it."""

        def found() -> list[dict[str, Any]]:
            return [
                line
                for line in self.audited()
                if line["method"].endswith(method) and why in line["why"] and line["subject"] == subject
            ]

        wait_until(found, 10, f"{self.name} has no record of {method} {why!r}: {self.audited()}")
        assert self.count() > self.before
        return found()[0]


def credentials_of(running: Services) -> Credentials:
    return read_client(running.home.client).security


def with_token(running: Services, folder: Path, token: str) -> Credentials:
    path = folder / "given.token"
    write_token(path, token)
    return replace(credentials_of(running), token=path)


def address_of(running: Services, service: str = "train") -> str:
    return read_client(running.home.client).services[service]


def refused(call: Callable[[], object]) -> str:
    """What a call is refused with: one line."""
    with pytest.raises((PhalanxError, OutsideError)) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    return text


def stop_with(running: Services, credentials: Credentials) -> str:
    with connect_train(address_of(running), credentials, patience_s=2.0) as client:
        return refused(lambda: client.stop(NAME))


@pytest.mark.parametrize("kind", ["foreign", "expired"])
def test_client_with_a_wrong_certificate_is_refused(shared: Services, tmp_path: Path, kind: str) -> None:
    train = Watched(shared, "train")
    if kind == "foreign":
        files = open_authority(tmp_path / "pki").issue("operator")
    else:
        files = open_authority(shared.home.pki).issue("late", validity=timedelta(seconds=-1))
    credentials = replace(credentials_of(shared), cert=files.cert, key=files.key)
    told = stop_with(shared, credentials)
    assert "certificate" in told and "phalanx up" in told, told
    why = {"foreign": "a certificate of another authority", "expired": "an expired certificate"}[kind]
    train.await_refusal("handshake", why)
    context = tmp_path / "client.toml"
    write_config(context, replace(read_client(shared.home.client), security=credentials))
    finished = run_cli(["job", "ls", "--context", context])
    assert finished.code != 0 and finished.out == ""
    told = [line for line in finished.err.splitlines() if line.startswith("phalanx: ")]
    assert len(told) == 1 and "certificate" in told[0], finished.err


def test_client_without_a_certificate_is_refused(shared: Services) -> None:
    train = Watched(shared, "train")
    ca = credentials_of(shared).ca.read_bytes()
    with grpc.secure_channel(address_of(shared), grpc.ssl_channel_credentials(ca)) as channel:
        with pytest.raises(grpc.RpcError) as error:
            TrainServiceStub(channel).StopJob(pb.StopJobRequest(name=NAME, request_id="x"), timeout=5)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    train.await_refusal("handshake", "no certificate")


def test_caller_without_a_token_is_refused(shared: Services) -> None:
    train = Watched(shared, "train")
    told = stop_with(shared, replace(credentials_of(shared), token=None))
    assert "token" in told
    train.await_refusal("StopJob", "token")


def test_token_of_another_authority_is_refused(shared: Services, tmp_path: Path) -> None:
    train = Watched(shared, "train")
    foreign = Authority.create(tmp_path / "token.key", tmp_path / "token.pub")
    told = stop_with(shared, with_token(shared, tmp_path, foreign.mint("mallory", Role.OPERATOR)))
    assert "this cluster's authority signed" in told and "HOME/tokens" in told
    line = train.await_refusal("StopJob", "this cluster's authority signed")
    assert line["spiffe"] == "spiffe://phalanx/operator"


def test_expired_token_is_refused(shared: Services, tmp_path: Path) -> None:
    train = Watched(shared, "train")
    authority = Authority.load(shared.home.authority)
    told = stop_with(shared, with_token(shared, tmp_path, authority.mint("old", Role.OPERATOR, lasts_s=-7200)))
    assert "not expired" in told
    train.await_refusal("StopJob", "not expired")


def test_viewer_may_look_and_may_not_stop(shared: Services) -> None:
    train = Watched(shared, "train")
    with Client(shared.home.viewer) as client:
        before = client.job(NAME)
        subject = client.subject
        told = refused(lambda: client.stop(NAME))
        assert "viewer" in told and "operator" in told
        for forbidden in (
            lambda: client.suspend(NAME),
            lambda: client.resume(NAME),
            lambda: client.checkpoint_now(NAME),
        ):
            refused(forbidden)
        assert client.job(NAME).revision == before.revision
    train.await_refusal("StopJob", "viewer", subject)
    finished = run_cli(["job", "stop", "guarded", "--context", shared.home.viewer])
    assert finished.code == 2 and "viewer" in finished.err and len(finished.err.splitlines()) == 1
    assert run_cli(["job", "show", "guarded", "--context", shared.home.viewer, "--json"]).code == 0


@pytest.mark.parametrize(
    ("project", "job", "attempt"),
    [("default", "other", 1), ("other", "guarded", 1), ("default", "guarded", 2), ("", "", 0)],
    ids=["of another job", "of another project", "of another attempt", "of no attempt"],
)
def test_gang_token_of_another_scope_is_refused(
    shared: Services, tmp_path: Path, project: str, job: str, attempt: int
) -> None:
    authority = Authority.load(shared.home.authority)
    credentials = with_token(shared, tmp_path, authority.mint("gang", Role.AGENT, project, job, attempt))
    checkpoint, data, train = (Watched(shared, name) for name in ("checkpoint", "data", "train"))
    with connect_checkpoint(address_of(shared, "checkpoint"), credentials) as client:
        with pytest.raises(Denied, match="token for"):
            client.begin(NAME, CheckpointRef(1, 2), 2)
        with pytest.raises(Denied, match="token for"):
            client.abort(NAME, CheckpointRef(1, 2))
    with connect_data(address_of(shared, "data"), credentials) as client, pytest.raises(Denied, match="token for"):
        client.reading_plan(NAME, 1, 0)
    assert "agent" in stop_with(shared, credentials)
    checkpoint.await_refusal("BeginCheckpoint", "token for", "gang")
    data.await_refusal("GetReadingPlan", "token for", "gang")
    train.await_refusal("StopJob", "operator", "gang")


def test_operator_of_another_job_may_not_touch_this_one(shared: Services, tmp_path: Path) -> None:
    train = Watched(shared, "train")
    authority = Authority.load(shared.home.authority)
    told = stop_with(shared, with_token(shared, tmp_path, authority.mint("ann", Role.OPERATOR, "default", "other")))
    assert "a token for job default/guarded" in told
    train.await_refusal("StopJob", "default/guarded", "ann")


def test_agent_may_not_act_as_the_monitor(shared: Services, tmp_path: Path) -> None:
    train = Watched(shared, "train")
    authority = Authority.load(shared.home.authority)
    credentials = with_token(shared, tmp_path, authority.mint("node", Role.AGENT))
    with connect_train(address_of(shared), credentials) as client, pytest.raises(Denied):
        client._stub.ReportIncident(pb.ReportIncidentRequest(request_id="x", job=NAME))
    train.await_refusal("ReportIncident", "service", "node")
