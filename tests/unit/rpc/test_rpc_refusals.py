"""Who is refused, in which words, and that it is on record."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import pytest
import rpc_kit as kit

from phalanx.rpc import (
    VIEWERS,
    Credentials,
    Denied,
    Metrics,
    Role,
    Server,
    Unauthenticated,
    access_problems,
    caller,
    connect,
)
from phalanx.rpc.testing import Cluster, make_cluster


def _refused(call: Callable[[], Any], kind: type[Exception] = Unauthenticated) -> str:
    with pytest.raises(kind) as refused:
        call()
    assert type(refused.value) is kind
    assert "\n" not in str(refused.value)
    return str(refused.value)


def _say(server: Server, credentials: Credentials, name: str = "Say") -> Any:
    with connect("echo", server.address, credentials) as channel:
        return getattr(kit.stub(channel), name)(kit.pb.Words(text="hi"), timeout=20)


def _audits(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "phalanx.audit"]


def test_caller_with_certificate_and_token_is_known_to_the_handler(cluster: Cluster) -> None:
    def say(request: Any, context: grpc.ServicerContext) -> Any:
        who = caller(context)
        return kit.pb.Words(text=f"{who.subject} {who.role} {who.spiffe_id}")

    with kit.serve_echo(cluster, kit.Echo(Say=say)) as server:
        answer = _say(server, cluster.credentials(Role.VIEWER, name="laptop"))
    assert answer.text == "laptop viewer spiffe://phalanx/laptop"


def test_foreign_certificate_is_refused_in_one_line(cluster: Cluster, tmp_path: Any) -> None:
    foreign = make_cluster(tmp_path / "foreign").credentials()
    with kit.serve_echo(cluster) as server:
        told = _refused(lambda: _say(server, replace(foreign, ca=cluster.credentials().ca)))
        assert "client.crt: expected one that the authority of service echo" in told
        told = _refused(lambda: _say(server, foreign))
        assert f"certificate of service echo at {server.address}: expected one that {foreign.ca} vouches for" in told


def test_expired_certificate_is_refused_in_one_line(cluster: Cluster) -> None:
    files = cluster.pki.issue("old", validity=timedelta(seconds=-5))
    credentials = replace(cluster.credentials(), cert=files.cert, key=files.key)
    with kit.serve_echo(cluster) as server:
        told = _refused(lambda: _say(server, credentials))
    assert "old.crt: expected one that is not expired (it ended at" in told


def test_expired_certificate_of_the_service_is_told_to_the_client(cluster: Cluster) -> None:
    config = cluster.service("echo")
    old = cluster.pki.issue("old", validity=timedelta(seconds=-5))
    security = replace(config.security, cert=old.cert, key=old.key)
    with kit.serve_echo(cluster, config={"security": security}) as server:
        told = _refused(lambda: _say(server, cluster.credentials()))
    assert "certificate has expired" in told


@pytest.mark.parametrize("is_tls", [False, True])
def test_caller_without_a_certificate_is_refused(cluster: Cluster, is_tls: bool) -> None:
    with kit.serve_echo(cluster) as server:
        tls = grpc.ssl_channel_credentials(cluster.credentials().ca.read_bytes())
        with (
            grpc.secure_channel(server.address, tls) if is_tls else grpc.insecure_channel(server.address) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            kit.stub(channel).Say(kit.pb.Words(), timeout=5)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_service_without_tls_is_told_in_one_line(cluster: Cluster) -> None:
    from concurrent.futures import ThreadPoolExecutor

    plain = grpc.server(ThreadPoolExecutor(1))
    port = plain.add_insecure_port("127.0.0.1:0")
    plain.start()
    try:
        with connect("echo", f"127.0.0.1:{port}", cluster.credentials()) as channel:
            told = _refused(lambda: kit.stub(channel).Say(kit.pb.Words()))
    finally:
        plain.stop(0)
    assert "expected a service that speaks TLS" in told


def test_missing_token_is_refused_and_audited(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with kit.serve_echo(cluster) as server, caplog.at_level(logging.WARNING):
        told = _refused(lambda: _say(server, replace(cluster.credentials(), token=None)))
    assert told.startswith("token: expected one with every call")
    (audit,) = _audits(caplog)
    assert audit["method"] == kit.method("Say")
    assert audit["spiffe"] == "spiffe://phalanx/client"
    assert audit["subject"] == ""
    assert audit["why"] == told
    assert audit["peer"].startswith("ipv4:127.0.0.1:")
    assert audit["time"].endswith("+00:00")


def test_token_of_another_authority_is_refused_and_audited(
    cluster: Cluster, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = make_cluster(tmp_path / "foreign").credentials(Role.OPERATOR)
    with kit.serve_echo(cluster) as server, caplog.at_level(logging.WARNING):
        told = _refused(lambda: _say(server, replace(cluster.credentials(), token=foreign.token)))
    assert "this cluster's authority signed" in told
    assert [audit["why"] for audit in _audits(caplog)] == [told]


def test_viewer_that_calls_an_operators_method_is_refused_audited_and_counted(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    with kit.serve_echo(cluster, metrics=metrics) as server, caplog.at_level(logging.WARNING):
        viewer = cluster.credentials(Role.VIEWER, name="laptop")
        assert _say(server, viewer).text == "hi"
        told = _refused(lambda: _say(server, viewer, "Do"), Denied)
        assert _say(server, cluster.credentials(), "Do").text == "hi"
    assert f"role for {kit.method('Do')} is 'viewer': expected operator" in told
    assert [(audit["subject"], audit["why"]) for audit in _audits(caplog)] == [("laptop", told)]
    labels = {"method": kit.method("Do"), "code": "PERMISSION_DENIED"}
    assert metrics.registry.get_sample_value("phalanx_rpc_refusals_total", labels) == 1


def test_token_of_another_job_is_refused_by_the_handlers_check_and_audited(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def do(request: Any, context: grpc.ServicerContext) -> Any:
        caller(context).require_job("p", request.text, 2)
        return request

    access = {kit.method("Do"): {Role.AGENT}}
    with kit.serve_echo(cluster, kit.Echo(Do=do), access=access) as server, caplog.at_level(logging.WARNING):
        credentials = cluster.credentials(Role.AGENT, "p", "run", 2)
        with connect("echo", server.address, credentials) as channel:
            assert kit.stub(channel).Do(kit.pb.Words(text="run")).text == "run"
            told = _refused(lambda: kit.stub(channel).Do(kit.pb.Words(text="other")), Denied)
    assert told == "scope of the token is 'job p/run': expected a token for job p/other; use a token of that scope"
    assert [audit["why"] for audit in _audits(caplog)] == [told]


def test_method_outside_the_access_table_is_refused_even_where_it_exists(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with kit.serve_echo(cluster, access={kit.method("Say"): VIEWERS}) as server:
        with caplog.at_level(logging.WARNING):
            told = _refused(lambda: _say(server, cluster.credentials(), "Do"), Denied)
        with connect("echo", server.address, cluster.credentials()) as channel:
            unknown = channel.unary_unary("/no.such.Service/Method", bytes, bytes)
            _refused(lambda: unknown(b""), Denied)
    assert "expected one that this service opens to callers" in told
    assert len(_audits(caplog)) == 2


def test_access_table_that_misses_or_invents_a_method_is_named() -> None:
    assert access_problems(kit.ACCESS, [kit.DESCRIPTOR]) == []
    table = {**kit.ACCESS, kit.method("Gone"): VIEWERS}
    del table[kit.method("Do")]
    assert access_problems(table, [kit.DESCRIPTOR]) == [
        f"{kit.method('Do')} is in no access table",
        f"{kit.method('Gone')} is no method",
    ]


def test_token_file_that_changes_is_used_from_the_next_call_on(cluster: Cluster) -> None:
    credentials = cluster.credentials(Role.VIEWER)
    assert credentials.token is not None
    with kit.serve_echo(cluster) as server, connect("echo", server.address, credentials) as channel:
        _refused(lambda: kit.stub(channel).Do(kit.pb.Words()), Denied)
        operator = cluster.credentials(Role.OPERATOR).token
        assert operator is not None
        operator.replace(credentials.token)
        kit.stub(channel).Do(kit.pb.Words())


def test_handshakes_that_tls_refuses_are_audited_where_stderr_is_a_file(
    cluster: Cluster, tmp_path: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    old = cluster.pki.issue("old", validity=timedelta(seconds=-5))
    own, foreign, metrics = cluster.credentials(), make_cluster(tmp_path / "foreign").credentials(), Metrics()
    chains = [(None, None), (foreign.key, foreign.cert), (old.key, old.cert)]
    tls = [grpc.ssl_channel_credentials(own.ca.read_bytes(), *(p and p.read_bytes() for p in pair)) for pair in chains]
    with kit.serve_echo(cluster, metrics=metrics) as server, caplog.at_level(logging.WARNING):
        for make in [lambda: grpc.insecure_channel(server.address)] + [
            lambda each=each: grpc.secure_channel(server.address, each) for each in tls
        ]:
            with make() as channel, pytest.raises(grpc.RpcError):
                kit.stub(channel).Say(kit.pb.Words(), timeout=5)
    told = {audit["why"] for audit in _audits(caplog)}
    kinds = ("no TLS", "no certificate", "a certificate of another authority", "an expired certificate")
    assert told == {f"TLS handshake with {kind}" for kind in kinds}
    labels = {"method": "handshake", "code": "UNAVAILABLE"}
    assert (metrics.registry.get_sample_value("phalanx_rpc_refusals_total", labels) or 0) >= 4
