"""Deadlines, retries, sizes, capacity, health, and what a busy or missing service looks like to its callers."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import rpc_kit as kit
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc import (
    Exhausted,
    FailedPrecondition,
    Limits,
    NotUp,
    TimedOut,
    Unavailable,
    connect,
    ended,
)
from phalanx.rpc.retry import LONGEST_PAUSE_S, pause_s
from phalanx.rpc.testing import Cluster

MIB = 2**20


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_all_four_kinds_of_call_answer(cluster: Cluster) -> None:
    with kit.serve_echo(cluster) as server, kit.call_echo(cluster, server) as channel:
        echo = kit.stub(channel)
        words = [kit.pb.Words(text=text) for text in "abc"]
        assert echo.Say(words[0]).text == "a"
        assert [each.at for each in echo.Count(kit.pb.Cursor(at=7))] == [8, 9, 10]
        assert echo.Collect(iter(words)).text == "a b c"
        assert [each.text for each in echo.Chat(iter(words))] == ["a", "b", "c"]


def test_call_that_names_no_timeout_has_the_default_deadline(cluster: Cluster) -> None:
    seen: list[float] = []

    def remember(request: Any, context: grpc.ServicerContext) -> Any:
        seen.append(context.time_remaining())
        return request

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        seen.append(context.time_remaining())
        yield request

    with (
        kit.serve_echo(cluster, kit.Echo(Do=remember, Count=watch)) as server,
        kit.call_echo(cluster, server) as channel,
    ):
        kit.stub(channel).Do(kit.pb.Words())
        kit.stub(channel).Do(kit.pb.Words(), timeout=99)
        list(kit.stub(channel).Count(kit.pb.Cursor()))
    for remaining_s, deadline_s in zip(seen, [10, 99, 3600], strict=True):
        assert 0.9 * deadline_s < remaining_s < 1.1 * deadline_s


def test_call_past_its_deadline_is_timed_out_and_its_handler_told(cluster: Cluster) -> None:
    over = threading.Event()

    def do(request: Any, context: grpc.ServicerContext) -> Any:
        assert ended(context).wait(20)
        over.set()
        return request

    with kit.serve_echo(cluster, kit.Echo(Do=do)) as server, kit.call_echo(cluster, server) as channel:
        with pytest.raises(TimedOut, match=r"service echo at .* did not answer .*/Do within 0.2 s"):
            kit.stub(channel).Do(kit.pb.Words(), timeout=0.2)
        assert over.wait(20)


class Flaky:
    """Breaks a number of times before it answers."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls += 1
        if self.calls <= self.failures:
            raise OutsideError("storage does not answer")
        return request


def test_method_declared_idempotent_is_tried_again_until_it_answers(cluster: Cluster) -> None:
    say, do = Flaky(3), Flaky(3)
    with (
        kit.serve_echo(cluster, kit.Echo(Say=say, Do=do)) as server,
        kit.call_echo(cluster, server, idempotent={"Do"}) as channel,
    ):
        assert kit.stub(channel).Say(kit.pb.Words(text="by contract")).text == "by contract"
        assert kit.stub(channel).Do(kit.pb.Words(text="by name")).text == "by name"
    assert (say.calls, do.calls) == (4, 4)


def test_method_not_declared_idempotent_is_tried_once(cluster: Cluster) -> None:
    do = Flaky(1)
    with (
        kit.serve_echo(cluster, kit.Echo(Do=do)) as server,
        kit.call_echo(cluster, server) as channel,
        pytest.raises(Unavailable, match="storage does not answer"),
    ):
        kit.stub(channel).Do(kit.pb.Words())
    assert do.calls == 1


def test_retries_end_at_the_deadline_with_the_last_cause(cluster: Cluster) -> None:
    say = Flaky(10**9)
    with kit.serve_echo(cluster, kit.Echo(Say=say)) as server, kit.call_echo(cluster, server) as channel:
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            kit.stub(channel).Say(kit.pb.Words(), timeout=1)
        assert time.monotonic() - began_s < 5
    assert say.calls > 1


def test_mistake_is_never_tried_again(cluster: Cluster) -> None:
    calls: list[int] = []

    def say(request: Any, context: grpc.ServicerContext) -> Any:
        calls.append(1)
        raise FailedPrecondition("x", expected="y", remedy="z")

    with (
        kit.serve_echo(cluster, kit.Echo(Say=say)) as server,
        kit.call_echo(cluster, server) as channel,
        pytest.raises(FailedPrecondition),
    ):
        kit.stub(channel).Say(kit.pb.Words())
    assert len(calls) == 1


def test_pauses_grow_twofold_to_a_bound_with_full_jitter() -> None:
    draw = random.Random(0)
    for number, bound_s in enumerate([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S, LONGEST_PAUSE_S]):
        pauses = [pause_s(number, draw) for _ in range(2000)]
        assert max(pauses) <= bound_s
        assert max(pauses) > 0.95 * bound_s
        assert min(pauses) < 0.05 * bound_s
    assert pause_s(10**6) <= LONGEST_PAUSE_S


def test_service_that_is_not_up_is_told_with_the_remedy(cluster: Cluster) -> None:
    address = _free_address()
    with connect("train", address, cluster.credentials(), patience_s=0.5) as channel:
        for call in (kit.stub(channel).Do, kit.stub(channel).Say):
            with pytest.raises(NotUp) as told:
                call(kit.pb.Words())
            assert str(told.value) == (
                f"service train at {address} is not up (connection refused); start it with `phalanx up`"
            )


def test_wait_ready_returns_when_the_service_comes_up_and_serves(cluster: Cluster) -> None:
    address = _free_address()
    with connect("echo", address, cluster.credentials()) as channel:
        with pytest.raises(NotUp):
            channel.wait_ready(0.3)
        waiting = threading.Thread(target=channel.wait_ready, args=(30,))
        waiting.start()
        with kit.serve_echo(cluster, listen=address) as server:
            waiting.join(30)
            assert not waiting.is_alive()
            server.set_serving(False)
            with pytest.raises(TimedOut, match="is up but does not serve yet"):
                channel.wait_ready(0.3)


def test_idempotent_call_outlives_a_restart_of_its_service(cluster: Cluster) -> None:
    server = kit.serve_echo(cluster)
    with kit.call_echo(cluster, server) as channel:
        kit.stub(channel).Say(kit.pb.Words())
        server.stop(0)
        answers: list[Any] = []
        calling = threading.Thread(target=lambda: answers.append(kit.stub(channel).Say(kit.pb.Words(), timeout=30)))
        calling.start()
        with kit.serve_echo(cluster, listen=server.address):
            calling.join(30)
    assert len(answers) == 1


def test_port_in_use_is_one_clear_line(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    with kit.serve_echo(cluster) as server, pytest.raises(PhalanxError) as told:
        kit.serve_echo(cluster, listen=server.address)
    assert str(told.value) == (
        f"address of echo is '{server.address}': expected a free port; "
        "end the process that uses it, or choose another port"
    )
    assert "Traceback" not in capfd.readouterr().err


def test_address_of_another_machine_is_one_clear_line(cluster: Cluster) -> None:
    with pytest.raises(PhalanxError, match=r"192\.0\.2\.1:0': expected an address of this machine"):
        kit.serve_echo(cluster, listen="192.0.2.1:0")


def _too_large(call: Any) -> str:
    with pytest.raises(Exhausted) as told:
        call()
    return str(told.value)


def test_message_of_40_mib_is_refused_before_it_is_sent(cluster: Cluster) -> None:
    large = kit.pb.Words(load=bytes(40 * MIB))
    with kit.serve_echo(cluster) as server, kit.call_echo(cluster, server) as channel:
        echo = kit.stub(channel)
        says = "Do is '40.0 MiB': expected at most 32 MiB; ask for less at a time"
        assert says in _too_large(lambda: echo.Do(large))
        assert "at most 32 MiB" in _too_large(lambda: echo.Collect(iter([large])))
        assert "at most 32 MiB" in _too_large(lambda: list(echo.Chat(iter([kit.pb.Words(), large]))))
        assert len(echo.Do(kit.pb.Words(load=bytes(31 * MIB))).load) == 31 * MIB


@pytest.mark.parametrize("num_mib", [40, 70])
def test_message_too_large_for_the_server_is_told_with_size_and_limit(cluster: Cluster, num_mib: int) -> None:
    with kit.serve_echo(cluster) as server, kit.call_echo(cluster, server, max_message_bytes=128 * MIB) as channel:
        told = _too_large(lambda: kit.stub(channel).Do(kit.pb.Words(load=bytes(num_mib * MIB))))
    assert f"is '{num_mib}.0 MiB': expected at most" in told


def test_answer_of_40_mib_is_refused_by_the_server_with_size_and_limit(cluster: Cluster) -> None:
    def do(request: Any, context: grpc.ServicerContext) -> Any:
        return kit.pb.Words(load=bytes(40 * MIB))

    with kit.serve_echo(cluster, kit.Echo(Do=do)) as server, kit.call_echo(cluster, server) as channel:
        assert "is '40.0 MiB': expected at most 32 MiB" in _too_large(lambda: kit.stub(channel).Do(kit.pb.Words()))


def _hold(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
    yield kit.pb.Cursor(at=1)
    ended(context).wait()


def test_streams_above_the_cap_are_refused_and_calls_still_answer(cluster: Cluster) -> None:
    limits = Limits(max_streams=8, max_calls=2)
    with (
        kit.serve_echo(cluster, kit.Echo(Count=_hold), config={"limits": limits}) as server,
        kit.call_echo(cluster, server) as channel,
    ):
        echo = kit.stub(channel)
        streams = [echo.Count(kit.pb.Cursor()) for _ in range(8)]
        assert [next(stream).at for stream in streams] == [1] * 8
        says = "open streams is 9: expected at most 8 at a time"
        assert says in _too_large(lambda: next(echo.Count(kit.pb.Cursor())))
        assert echo.Do(kit.pb.Words(text="still")).text == "still"
        assert list(_drain_after_cancel(streams.pop())) == []
        deadline_s = time.monotonic() + 20
        while not _is_let_in(echo):
            assert time.monotonic() < deadline_s


def _drain_after_cancel(stream: Any) -> Iterator[Any]:
    stream.cancel()
    yield from stream


def _is_let_in(echo: Any) -> bool:
    try:
        with echo.Count(kit.pb.Cursor()) as stream:
            return bool(next(stream).at == 1)
    except Exhausted:
        return False


def test_stop_ends_streams_at_once_and_says_that_the_service_went_away(cluster: Cluster) -> None:
    server = kit.serve_echo(cluster, kit.Echo(Count=_hold))
    with kit.call_echo(cluster, server) as channel:
        stream = kit.stub(channel).Count(kit.pb.Cursor())
        next(stream)
        began_s = time.monotonic()
        server.stop(grace_s=20)
        assert time.monotonic() - began_s < 10
        with pytest.raises(Unavailable):
            next(stream)


def test_stop_lets_a_running_call_finish_within_its_grace(cluster: Cluster) -> None:
    entered, go = threading.Event(), threading.Event()

    def do(request: Any, context: grpc.ServicerContext) -> Any:
        entered.set()
        assert go.wait(20)
        return request

    server = kit.serve_echo(cluster, kit.Echo(Do=do))
    with kit.call_echo(cluster, server) as channel:
        answers: list[Any] = []
        calling = threading.Thread(target=lambda: answers.append(kit.stub(channel).Do(kit.pb.Words(), timeout=30)))
        calling.start()
        assert entered.wait(20)
        stopping = threading.Thread(target=server.stop, args=(20,))
        stopping.start()
        go.set()
        calling.join(20)
        stopping.join(20)
    assert len(answers) == 1


def test_health_and_reflection_speak_the_standard_protocols(cluster: Cluster) -> None:
    with kit.serve_echo(cluster) as server, kit.call_echo(cluster, server) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service=kit.SERVICE)
        assert health.Check(ask).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(ask)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        server.set_serving(False, kit.SERVICE)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = reflection.ServerReflectionInfo(asked)
    names = [each.name for each in answer.list_services_response.service]
    assert kit.SERVICE in names


def test_requests_that_raise_end_the_call_with_their_own_error(cluster: Cluster) -> None:
    def requests() -> Iterator[Any]:
        yield kit.pb.Words(text="a")
        raise LookupError("own")

    with kit.serve_echo(cluster) as server, kit.call_echo(cluster, server) as channel:
        with pytest.raises(LookupError, match="own"):
            kit.stub(channel).Collect(requests())
        with pytest.raises(LookupError, match="own"):
            list(kit.stub(channel).Chat(requests()))
