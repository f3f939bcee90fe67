"""Errors keep their class, words and value through a real call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import rpc_kit as kit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.core.errors import OutsideError, PhalanxError, Problems
from phalanx.objects import StoreDenied, StoreError
from phalanx.rpc import (
    AlreadyExists,
    Denied,
    Exhausted,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    Unauthenticated,
    Unavailable,
)
from phalanx.rpc.status import MAX_STATUS_BYTES, code_of, wire_status
from phalanx.rpc.testing import Cluster, make_cluster

FAMILY = [NotFound, AlreadyExists, FailedPrecondition, OutOfRange, Exhausted, Denied, Unauthenticated, PhalanxError]


class Raiser:
    """A service whose methods raise what the test puts here."""

    def __init__(self, cluster: Cluster) -> None:
        self.error: Exception = PhalanxError("x", expected="y", remedy="z")
        self._server = kit.serve_echo(cluster, kit.Echo(Do=self._raise, Count=self._raise_later, Chat=self._raise))
        self._channel = kit.call_echo(cluster, self._server)
        self.stub = kit.stub(self._channel)

    def close(self) -> None:
        self._channel.close()
        self._server.stop(0)

    def told(self, error: Exception) -> Exception:
        self.error = error
        with pytest.raises((PhalanxError, OutsideError)) as told:
            self.stub.Do(kit.pb.Words())
        return told.value

    def _raise(self, request: Any, context: grpc.ServicerContext) -> Any:
        raise self.error

    def _raise_later(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield kit.pb.Cursor(at=1)
        raise self.error


@pytest.fixture(scope="module")
def raiser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raiser]:
    raiser = Raiser(make_cluster(tmp_path_factory.mktemp("errors")))
    yield raiser
    raiser.close()


@pytest.mark.parametrize("kind", FAMILY)
def test_error_of_a_handler_is_raised_again_as_the_same_class(raiser: Raiser, kind: type[PhalanxError]) -> None:
    told = raiser.told(kind("job p/run", value=7, expected="a job that exists", remedy="list them with `job ls`"))
    assert type(told) is kind
    assert str(told) == "job p/run is 7: expected a job that exists; list them with `job ls`"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.tuples(st.text(max_size=200), st.text(max_size=200), st.text(max_size=200)),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=200)),
)
def test_error_with_any_words_arrives_unchanged(raiser: Raiser, words: tuple[str, str, str], value: object) -> None:
    told = raiser.told(FailedPrecondition(words[0], value=value, expected=words[1], remedy=words[2]))
    assert isinstance(told, FailedPrecondition)
    assert (told.where, told.expected, told.remedy, told.value) == (*words, value)


def test_error_of_a_stream_comes_after_its_items(raiser: Raiser) -> None:
    raiser.error = OutOfRange("revision", value=3, expected="at least 9", remedy="start again from the job's state")
    stream = raiser.stub.Count(kit.pb.Cursor())
    assert next(stream).at == 1
    with pytest.raises(OutOfRange, match="revision is 3"):
        next(stream)


def test_problems_arrive_one_by_one(raiser: Raiser) -> None:
    mistakes = [PhalanxError(f"key{i}", value=i, expected="x", remedy="y") for i in range(3)]
    told = raiser.told(Problems("job.toml", mistakes))
    assert isinstance(told, Problems)
    assert str(told) == "\n".join(map(str, mistakes))


def test_problems_beyond_what_metadata_carry_are_cut_not_lost(raiser: Raiser) -> None:
    mistakes = [PhalanxError(f"key{i}", value="x" * 500, expected="y" * 5000, remedy="z") for i in range(200)]
    told = raiser.told(Problems("job.toml", mistakes))
    assert isinstance(told, Problems)
    assert 5 < len(told.problems) < 200
    assert len(wire_status(told).details) < MAX_STATUS_BYTES + 10_000


def test_error_of_another_room_is_an_invalid_argument(raiser: Raiser) -> None:
    error = StoreDenied("storage URL", value=Path("/x"), expected="a URL", remedy="write one")
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    told = raiser.told(error)
    assert type(told) is PhalanxError
    assert str(told) == "storage URL is '/x': expected a URL; write one"


def test_what_broke_outside_the_service_is_unavailable_with_its_words(raiser: Raiser) -> None:
    told = raiser.told(StoreError("bucket does not answer"))
    assert isinstance(told, Unavailable)
    assert str(told).endswith("bucket does not answer")
    assert str(told).startswith("service echo at 127.0.0.1:")


def test_unexpected_error_is_logged_under_the_number_that_the_caller_sees(
    raiser: Raiser, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        told = raiser.told(ZeroDivisionError("secret detail"))
    assert type(told) is OutsideError
    assert "secret detail" not in str(told)
    number = str(told).split("unexpected error ")[1].split(";")[0]
    assert [record.exc_info is not None for record in caplog.records if number in record.getMessage()] == [True]


def test_what_a_handler_aborts_by_itself_is_kept(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    def do(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.DATA_LOSS, "own words")

    with (
        kit.serve_echo(cluster, kit.Echo(Do=do)) as server,
        kit.call_echo(cluster, server) as channel,
        pytest.raises(OutsideError, match="DATA_LOSS: own words"),
    ):
        kit.stub(channel).Do(kit.pb.Words())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
