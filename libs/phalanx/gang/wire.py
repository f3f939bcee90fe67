"""How parent, fork server and ranks talk: JSON objects, one a line, over local sockets and pipes, with descriptors
beside them.

A line may be longer than PIPE_BUF: every pipe has one writing process, and `LineBuffer` holds what has come until its
newline.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Mapping, Sequence
from typing import Any

CHUNK_BYTES = 1 << 16
MAX_DESCRIPTORS = 250  # the kernel passes at most 253 in one message


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as a line of JSON; NaN and infinities are kept in Python's spelling."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Bytes in, whole messages out; the last, unfinished line waits for its rest."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes. Raises ValueError for a line that is not a JSON object."""
        self._pending += data
        if b"\n" not in data:
            return []
        *lines, rest = bytes(self._pending).split(b"\n")
        self._pending = bytearray(rest)
        return [_decode(line) for line in lines if line]

    @property
    def num_pending_bytes(self) -> int:
        return len(self._pending)


def _decode(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {line[:80]!r}")
    return message


def write_all(fd: int, data: bytes) -> None:
    """Write every byte of `data` to a blocking descriptor; raises OSError (BrokenPipeError when nobody reads)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def send_order(channel: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors, which travel with its first byte; the receiver gets its own copies of them."""
    assert len(fds) <= MAX_DESCRIPTORS, f"{len(fds)} descriptors in one order, the limit is {MAX_DESCRIPTORS}"
    data = encode(message)
    sent = socket.send_fds(channel, [data], list(fds)) if fds else 0
    channel.sendall(data[sent:])


def is_readable(channel: socket.socket, timeout_s: float) -> bool:
    """Whether something has come, or the other side is gone, within the time; whatever number the descriptor has, which
    select(2) limits to 1,023.
    """
    with selectors.PollSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The next bytes and the descriptors that came with them (closed on exec); no bytes: the other side is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, CHUNK_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return b"", []
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds
