"""The data service as a process over mTLS: its promises as a client sees them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.data_service import data_process, register_job
from support.datasets import open_attempt, write_dataset

from phalanx.api.data.v1 import data_service_pb2
from phalanx.core.digest import xxh3
from phalanx.core.errors import PhalanxError
from phalanx.data.access import ACCESS
from phalanx.data.client import Action, connect_data
from phalanx.lineage import Lineage
from phalanx.lineage.plan import reading_plan
from phalanx.objects import open_store
from phalanx.rpc import (
    AlreadyExists,
    Database,
    Denied,
    NotFound,
    Role,
    Superseded,
    Unauthenticated,
    Unavailable,
    access_problems,
    write_config,
)
from phalanx.rpc.testing import make_cluster
from phalanx.trainer.places import job_store

JOB = "projects/default/jobs/tiny"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with data_process(tmp_path_factory.mktemp("data-service")) as process:
        yield process


@pytest.fixture(scope="module")
def data(service):
    return write_dataset(f"file://{service.folder}/corpus")


@pytest.fixture
def new_job(service, data, request):
    """A registered job of this test's own with its first attempt opened: (job, name on the wire)."""
    uid = f"job-{xxh3(request.node.name.encode())[-12:]}"
    job = register_job(service.storage, f"{data}/train", uid)
    open_attempt(job)
    return job, f"projects/default/jobs/{uid}", uid


def test_access_table_names_every_method():
    assert access_problems(ACCESS, list(data_service_pb2.DESCRIPTOR.services_by_name.values())) == []


def test_register_get_and_list_over_the_wire(service, data):
    with service.client() as client:
        version = client.register("web", data, "r-web")
        assert version.owner == "client" and version.splits[0].num_tokens > 0
        assert client.register("web", data, "r-web") == version
        assert client.dataset("web") == (version,)
        client.register("another", data)
        listed = [each.dataset for each in client.datasets(page_size=1)]
    assert listed == sorted(listed) and {"another", "web"} <= set(listed)
    with service.client(Role.VIEWER) as viewer:
        assert viewer.dataset("web") == (version,)


def test_plan_over_the_wire_is_that_of_storage(service, new_job):
    job, name, uid = new_job
    lineage = Lineage(job_store(job))
    lineage.append_journal(1, "skip", 4, {"num_windows": 3})
    with service.gang(uid) as client:
        assert client.reading_plan(name, 1, 5) == reading_plan(lineage.journal(1), 5)
        assert client.reading_plan(name, 1, 5, 3).horizon_step == 8


def test_change_of_weights_over_the_wire_is_in_the_next_plan_and_counts_once(service, data):
    other = write_dataset(f"file://{service.folder}/other", seed=2)
    sources = {"web": {"url": f"{data}/train", "weight": 3}, "code": {"url": f"{other}/train", "weight": 1}}
    job = register_job(service.storage, None, "mixed", more={"data": {"sources": sources}})
    open_attempt(job)
    name = "projects/default/jobs/mixed"
    with service.client(Role.OPERATOR) as client, service.gang("mixed") as gang:
        assert gang.reading_plan(name, 1, 0).mixture == ()
        assert client.change_mixture(name, {"code": "1/2"}, "one") == 1
        assert client.change_mixture(name, {"code": "1/2"}, "one") == 1
        plan = gang.reading_plan(name, 1, 16)
        assert [(each.position, each.weights) for each in plan.mixture] == [(16 * 4, (("code", "1/2"),))]
        for weights, told in (({"books": "1"}, "one of the job's sources"), ({"web": "x"}, "a number of 0 or more")):
            with pytest.raises(PhalanxError, match=told):
                client.change_mixture(name, weights)
        for denied in (gang, service.client(Role.VIEWER)):
            with pytest.raises(Denied):
                denied.change_mixture(name, {"code": "1"})


def test_plan_of_a_superseded_attempt_is_refused_as_such(service, new_job):
    job, name, uid = new_job
    with service.gang(uid) as client:
        client.reading_plan(name, 1, 0)
        open_attempt(job)
        with pytest.raises(Superseded, match="attempt 2 has been opened since"):
            client.reading_plan(name, 1, 0)
        with pytest.raises(Superseded):
            client.report_damage(name, 1, "t-00000000.tar", "x", 1)
    with service.gang(uid, attempt=2) as client:
        assert client.reading_plan(name, 2, 0).horizon_step == 16


@pytest.mark.parametrize(
    "scope",
    [
        {"role": Role.AGENT, "project": "default", "job": "other", "attempt": 1},
        {"role": Role.AGENT, "project": "elsewhere"},
        {"role": Role.AGENT, "attempt": 2, "own": True},
        {"role": Role.AGENT, "attempt": 0, "own": True},
        {"role": Role.AGENT},
        {"role": Role.VIEWER},
        {"role": Role.OPERATOR},
        {"role": Role.SERVICE},
    ],
)
def test_plan_and_report_with_a_token_of_another_scope_are_denied_and_audited(service, new_job, scope):
    _, name, uid = new_job
    scope = dict(scope)
    if scope.pop("own", False):
        scope |= {"project": "default", "job": uid}
    before = service.log().count('"audit": "refused"')
    with service.client(**scope) as client:
        with pytest.raises(Denied):
            client.reading_plan(name, 1, 0)
        with pytest.raises(Denied):
            client.report_damage(name, 1, "t-00000000.tar", "x", 1)
    assert service.log().count('"audit": "refused"') == before + 2


@pytest.mark.parametrize("role", [Role.VIEWER, Role.AGENT, Role.SERVICE])
def test_registration_by_others_than_operators_is_denied(service, data, role):
    with service.client(role) as client, pytest.raises(Denied):
        client.register("web2", data)


def test_damage_list_of_a_job_out_of_scope_is_denied(service, new_job):
    _, name, _ = new_job
    with service.client(Role.VIEWER, project="elsewhere") as client, pytest.raises(Denied):
        client.damages(name)


def test_client_with_a_foreign_token_is_not_let_in(service, data, tmp_path):
    """Its certificate is of this cluster, its token of another authority."""
    foreign = make_cluster(tmp_path).credentials(Role.OPERATOR)
    with service.client() as client:
        assert client.datasets() is not None
    own = service.cluster.credentials(Role.OPERATOR)
    own.token.write_bytes(foreign.token.read_bytes())
    with connect_data(service.address, own) as client, pytest.raises(Unauthenticated, match="cluster's authority"):
        client.register("web3", data)


def test_client_with_a_foreign_certificate_is_not_let_in(service, tmp_path):
    foreign = make_cluster(tmp_path).credentials(Role.OPERATOR)
    with (
        connect_data(service.address, foreign, deadline_s=5, patience_s=0) as client,
        pytest.raises((PhalanxError, Unavailable)),
    ):
        client.dataset("web")


BAD = [
    (lambda client, name, data: client.register("Web", data), PhalanxError, "dataset is 'Web'"),
    (lambda client, name, data: client.register("web", "nowhere"), PhalanxError, "storage URL is 'nowhere'"),
    (lambda client, name, data: client.register("web", f"{data}/train"), PhalanxError, "expected a dataset"),
    (lambda client, name, data: client.register("x", data, "r-web0") and client.register("y", data, "r-web0"),
     AlreadyExists, "request_id is 'r-web0'"),
    (lambda client, name, data: client.dataset("nothing"), NotFound, "dataset is 'nothing'"),
    (lambda client, name, data: list(client.datasets(page_size=5000)), PhalanxError, "page_size is 5000"),
    (lambda client, name, data: client.damages("tiny"), PhalanxError, "job is 'tiny'"),
    (lambda client, name, data: client.damages("projects/default/jobs/none"), NotFound, "jobs/none"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), BAD)
def test_bad_input_of_an_operator_is_one_line(service, data, new_job, call, kind, text):
    with service.client() as client, pytest.raises(kind, match=text) as error:
        call(client, new_job[1], data)
    assert "\n" not in str(error.value) and type(error.value) is kind


GANG_BAD = [
    (lambda client, name: client.reading_plan(name, 1, -1), PhalanxError, "step is -1"),
    (lambda client, name: client.reading_plan(name, 1, 0, -2), PhalanxError, "horizon_steps is -2"),
    (lambda client, name: client.report_damage(name, 1, "t-9.tar", "x", 1), NotFound, "shard is 't-9.tar'"),
    (lambda client, name: client.report_damage(name, 1, "../x", "x", 1), NotFound, "shard is '../x'"),
    (lambda client, name: client.report_damage(name, 1, "t-00000001.tar", "x", 0), PhalanxError, "step is 0"),
]


@pytest.mark.parametrize(("call", "kind", "text"), GANG_BAD)
def test_bad_input_of_a_gang_is_one_line(service, new_job, call, kind, text):
    _, name, uid = new_job
    with service.gang(uid) as client, pytest.raises(kind, match=text) as error:
        call(client, name)
    assert "\n" not in str(error.value) and type(error.value) is kind


def test_report_of_a_whole_shard_says_try_again_and_writes_nothing(service, new_job):
    job, name, uid = new_job
    with service.gang(uid) as client:
        damage = client.report_damage(name, 1, "t-00000001.tar", "timed out", 2)
    assert (damage.action, damage.zero_weight, damage.journal_entry) == (Action.RETRY, (), 0)
    assert Lineage(job_store(job)).journal(1) == ()
    with service.client(Role.VIEWER) as client:
        assert client.damages(name) == ()


def test_report_of_a_damaged_shard_is_decided_once_and_listed(tmp_path):
    with data_process(tmp_path) as service:
        data = write_dataset(f"file://{tmp_path}/corpus")
        job = register_job(service.storage, f"{data}/train")
        open_attempt(job)
        Path(tmp_path / "corpus/train/t-00000001.tar").write_bytes(b"nothing")
        with service.gang() as client, service.client() as operator:
            first = client.report_damage(JOB, 1, "t-00000001.tar", "bad\nbytes", 2)
            assert (first.action, first.journal_entry, first.zero_weight) == (Action.STOP, 1, ())
            assert "has 7 bytes instead of" in first.why and "(reader: bad bytes)" in first.why
            assert client.report_damage(JOB, 1, "t-00000001.tar", "again", 3) == first
            assert operator.damages(JOB) == (first,)
        with urllib.request.urlopen(f"http://{service.metrics}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert 'phalanx_data_damage_reports_total{action="stop"} 2.0' in text
        assert 'method="/phalanx.api.data.v1.DataService/ReportDamage"' in text
        assert service.end() == 0


def start_with(folder: Path, **changes: object) -> tuple[int, str]:
    """Exit code and last line of a service whose file is changed."""
    cluster = make_cluster(folder)
    fields = {"storage": f"file://{folder}/store", "database": Database(f"sqlite:///{folder}/x.sqlite"), **changes}
    write_config(folder / "data.toml", cluster.service("data", **fields))
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.data", "--config", str(folder / "data.toml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("phalanx: ")]
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0]


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"storage": ""}, 2, "storage: expected URL of the cluster's root"),
        ({"storage": "ftp://x"}, 2, "storage URL is 'ftp://x'"),
        ({"options": {"horizon": 3}}, 2, "horizon"),
        ({"options": {"horizon_steps": 0}}, 2, "options.horizon_steps is 0"),
    ],
)
def test_service_that_cannot_work_says_so_in_one_line_and_exits(tmp_path, changes, code, text):
    found, line = start_with(tmp_path, **changes)
    assert found == code and text in line


def test_service_whose_port_is_taken_says_so_and_exits_with_2(service, tmp_path):
    code, line = start_with(tmp_path, listen=service.address)
    assert code == 2 and service.address.rpartition(":")[2] in line


def test_service_files_and_log_hold_no_token(service):
    with service.client() as client:
        list(client.datasets())
    token = service.cluster.credentials(Role.OPERATOR).token.read_text().strip()
    for file in (service.folder / "data.log", service.folder / "data.toml", service.folder / "data.sqlite"):
        assert token.encode() not in file.read_bytes()
    registry = open_store(service.storage)
    for info in registry.list("registry/datasets/"):
        assert token not in json.dumps(registry.read(info.key).decode())
