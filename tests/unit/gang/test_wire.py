"""Lines over pipes: however they are cut, whole messages come out."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.gang.wire import LineBuffer, encode, receive, send_order


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=300)), max_size=5), st.integers(1, 50))
def test_line_buffer_any_cut_gives_the_same_messages(messages, num_bytes):
    stream = b"".join(map(encode, messages))
    buffer, got = LineBuffer(), []
    for start in range(0, len(stream), num_bytes):
        got += buffer.feed(stream[start : start + num_bytes])
    assert got == messages
    assert buffer.num_pending_bytes == 0


def test_line_buffer_unfinished_line_waits():
    buffer = LineBuffer()
    assert buffer.feed(b'{"a":') == []
    assert buffer.num_pending_bytes == 5
    assert buffer.feed(b"1}\n") == [{"a": 1}]


@pytest.mark.parametrize("line", [b"[1]\n", b"nonsense\n"])
def test_line_buffer_line_that_is_no_object_is_refused(line):
    with pytest.raises(ValueError):
        LineBuffer().feed(line)


def test_send_order_descriptors_arrive_closed_on_exec():
    left, right = socket.socketpair()
    read, write = os.pipe()
    with left, right:
        send_order(left, {"order": "x", "text": "y" * 100_000}, [write])
        buffer, messages, fds = LineBuffer(), [], []
        while not messages:
            data, more = receive(right)
            messages += buffer.feed(data)
            fds += more
        assert messages[0]["order"] == "x"
        assert len(fds) == 1 and not os.get_inheritable(fds[0])
        os.write(fds[0], b"hello")
        assert os.read(read, 10) == b"hello"
        left.close()
        assert receive(right) == (b"", [])
    for fd in (read, write, *fds):
        os.close(fd)
