"""A piece from S3 when the server's replies break: a real server behind a proxy that spoils them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from support.faulty_proxy import Proxy, Spoiler
from support.ministack import Endpoint

from phalanx.objects import ObjectStore, StoreError

DATA = os.urandom(3_000_000)
Open = Callable[..., ObjectStore]


def spoil_first(proxy: Proxy, spoiler: Spoiler, count: int) -> None:
    """Spoils the first `count` reads."""
    proxy.choose = lambda method, path, number: spoiler if method == "GET" and number < count else None


def read(store: ObjectStore, offset: int, length: int) -> bytes:
    """The piece of "k"."""
    memory = memoryview(bytearray(length))
    assert store.read_piece("k", offset, memory) == memory
    return bytes(memory)


def starts_asked(proxy: Proxy) -> list[int]:
    """First bytes of the ranges asked for."""
    found = [re.match(r"bytes=(\d+)-", ranged) for method, _, ranged in proxy.seen if method == "GET"]
    return [int(match[1]) for match in found if match]


def test_cut_reply_is_continued(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint)
    store.create("k", DATA)
    spoil_first(proxy, Spoiler(cut_body=1_000_000), count=2)
    assert read(store, 500_000, 2_400_000) == DATA[500_000:2_900_000]
    starts = starts_asked(proxy)
    assert len(starts) == 3
    assert 500_000 == starts[0] < starts[1] < starts[2] <= 2_500_000


def test_shorter_range_than_asked_is_never_passed_on(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint)
    store.create("k", DATA)
    spoil_first(proxy, Spoiler(shorten=1_000_000), count=1)
    assert read(store, 500_000, 2_400_000) == DATA[500_000:2_900_000]


def test_server_that_answers_other_bytes_is_an_error(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint, deadline_s=0.5)
    store.create("k", b"x" * 200)
    spoil_first(proxy, Spoiler(other_start=7), count=99)
    with pytest.raises(StoreError):
        read(store, 100, 50)


def test_object_replaced_between_tries_gives_one_version_whole(
    open_place: Open, proxy: Proxy, ministack: Endpoint
) -> None:
    store, direct = open_place(proxy.endpoint), open_place(ministack)
    direct.create("k", DATA)
    other = DATA[::-1]

    def replace_then_shorten(method: str, path: str, number: int) -> Spoiler | None:
        if method != "GET" or number > 1:
            return None
        if number == 1:
            direct.delete("k")
            direct.create("k", other)
        return Spoiler(shorten=1_000_000)

    proxy.choose = replace_then_shorten
    assert read(store, 500_000, 2_400_000) == other[500_000:2_900_000]


def test_cut_reply_of_another_version_is_read_anew_whole(open_place: Open, proxy: Proxy, ministack: Endpoint) -> None:
    store, direct = open_place(proxy.endpoint), open_place(ministack)
    direct.create("k", DATA)
    other = DATA[::-1]

    def cut_then_replace(method: str, path: str, number: int) -> Spoiler | None:
        if method != "GET":
            return None
        if number == 1:
            direct.delete("k")
            direct.create("k", other)
        return Spoiler(cut_body=1_000_000) if number == 0 else None

    proxy.choose = cut_then_replace
    assert read(store, 500_000, 2_400_000) == other[500_000:2_900_000]


def test_given_up_names_url_range_place_tries_and_cause(open_place: Open, proxy: Proxy, place: str) -> None:
    store = open_place(proxy.endpoint, deadline_s=2)
    store.create("k", DATA)
    spoil_first(proxy, Spoiler(refuse=503), count=99)
    with pytest.raises(StoreError) as caught:
        read(store, 500_000, 2_400_000)
    told = str(caught.value)
    assert f"{place}/k: " in told
    assert re.search(r"bytes 500000 to 2900000, stopped at 500000: still failing after (\d+) tries", told), told
    assert "503" in told
