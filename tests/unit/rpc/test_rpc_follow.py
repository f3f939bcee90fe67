"""A followed stream brings each item once, whatever breaks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import rpc_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.rpc import NotUp, OutOfRange, Unavailable, ended, follow
from phalanx.rpc.testing import Cluster


def _same(at: int) -> int:
    return at


def _breaking(last: int, breaks: list[int], repeats: int) -> Callable[[int], Iterator[int]]:
    """Streams that end after as many items as `breaks` says, one after the other, and repeat a few."""
    left = list(breaks)

    def start(cursor: int) -> Iterator[int]:
        ends_after = left.pop(0) if left else last + 1
        for number, at in enumerate(range(max(1, cursor + 1 - repeats), last + 1)):
            if number >= ends_after:
                raise Unavailable("gone")
            yield at
        if ends_after <= last:
            raise Unavailable("gone")

    return start


@settings(max_examples=200, deadline=None)
@given(last=st.integers(0, 40), breaks=st.lists(st.integers(0, 10), max_size=30), repeats=st.integers(0, 3))
def test_follow_through_any_breaks_brings_each_item_once(last: int, breaks: list[int], repeats: int) -> None:
    items = follow(_breaking(last, breaks, repeats), _same, longest_pause_s=0)
    assert list(items) == list(range(1, last + 1))


def test_follow_a_dead_service_gives_up_in_time() -> None:
    def start(cursor: int) -> Iterator[int]:
        raise NotUp("not up")

    with pytest.raises(NotUp):
        list(follow(start, _same, give_up_s=0.2))


def test_follow_past_what_is_kept_raises_at_once() -> None:
    def start(cursor: int) -> Iterator[int]:
        raise OutOfRange("revision", value=cursor, expected="at least 9", remedy="start again")

    with pytest.raises(OutOfRange):
        list(follow(start, _same, 3))


def test_follow_that_is_stopped_ends_while_it_waits() -> None:
    stop, tried = threading.Event(), threading.Event()

    def start(cursor: int) -> Iterator[int]:
        tried.set()
        raise NotUp("not up")

    following = threading.Thread(target=lambda: list(follow(start, _same, stop=stop, longest_pause_s=60)))
    following.start()
    assert tried.wait(10)
    stop.set()
    following.join(10)
    assert not following.is_alive()


class Log:
    """An append-only log, served from any cursor; each stream breaks after a random number of items."""

    def __init__(self, num_items: int) -> None:
        self._num_items, self._draw, self.num_streams = num_items, random.Random(1), 0

    def count(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.num_streams += 1
        until = request.at + self._draw.randrange(0, 8)
        for at in range(request.at + 1, min(until, self._num_items) + 1):
            yield kit.pb.Cursor(at=at)
        if until <= self._num_items:
            context.cancel()
            ended(context).wait(10)


def test_follow_through_a_hundred_reconnects_and_restarts_misses_and_repeats_nothing(cluster: Cluster) -> None:
    log = Log(500)
    server = kit.serve_echo(cluster, kit.Echo(Count=log.count))
    seen: list[int] = []
    with kit.call_echo(cluster, server) as channel:
        count = kit.stub(channel).Count
        items = follow(lambda at: count(kit.pb.Cursor(at=at)), lambda item: item.at, longest_pause_s=0.02)
        for item in items:
            seen.append(item.at)
            if item.at % 100 == 0:
                server.stop(0)
                server = kit.serve_echo(cluster, kit.Echo(Count=log.count), listen=server.address)
    server.stop(0)
    assert seen == list(range(1, 501))
    assert log.num_streams > 100
