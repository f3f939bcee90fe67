"""Work in daemon threads: all of it in order, or the failure of one."""

from __future__ import annotations

import threading

import pytest

from phalanx.snapshot import background


def test_each_gives_all_results_in_order_from_several_threads() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def act(number: int) -> int:
        if number < 2:
            meeting.wait()
        return number * number

    assert background.each(act, 5, 2, "t") == [0, 1, 4, 9, 16]
    assert background.each(act, 0, 2, "t") == []


def test_each_after_a_failure_begins_no_more_and_raises_it() -> None:
    begun = []

    def act(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise KeyError("second")
        return number

    with pytest.raises(KeyError, match="second"):
        background.each(act, 100, 1, "t")
    assert begun == [0, 1]


def test_begin_hands_on_what_ends_a_thread_whatever_it_is() -> None:
    def ends() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        background.begin(ends, "t").result(30)
