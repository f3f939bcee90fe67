"""The parent's side of the fork server: start it, wait for its imports, order gangs from it, end it.

It runs in a session of its own, so that Ctrl-C in the terminal reaches the parent alone, which decides. Its environment
is complete before it starts (OMP_NUM_THREADS has no effect on a process that has loaded torch): LOCAL_DEFAULTS where
this process's own says nothing, and LOCAL_FORCED in any case. A server that died is replaced by the next start.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang.gang import Gang
from phalanx.gang.network import listen, network_environ
from phalanx.gang.order import GangOrder, Rendezvous
from phalanx.gang.wire import LineBuffer, is_readable, receive, send_order

LOCAL_DEFAULTS: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Unless an order names an address of this host, all ranks are here and meet on the loopback; a name meant for a
# cluster's network may not exist here.
LOCAL_FORCED: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}
READY_DEADLINE_S = 120.0
START_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 5.0


class GangBusyError(RuntimeError):
    """A gang was ordered while the one before is alive: a mistake of the program's."""


class ForkServer:
    """A process that has imported `preload` and forks ranks. A context manager; one gang at a time, many one after
    another.

    environ: laid over this process's own, LOCAL_DEFAULTS and LOCAL_FORCED. ready_deadline_s: for the imports, counted
    from the first order; half of it for a gang's start, where that is more than START_DEADLINE_S. remedy: how a user
    may lengthen it, said where it passes. Start it from a thread that outlives it. Its messages go to this process's
    stderr. `start` and `close` may come from several threads: a start that is under way ends with OutsideError when the
    server is closed, and so does one after it.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        *,
        ready_deadline_s: float = READY_DEADLINE_S,
        remedy: str = "",
    ) -> None:
        self._preload, self._ready_deadline_s, self._remedy = tuple(preload), ready_deadline_s, remedy
        self._environ = {**LOCAL_DEFAULTS, **os.environ, **LOCAL_FORCED, **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lines = LineBuffer()
        self._ready = self._is_closed = False
        self._gang: Gang | None = None
        self._lock = threading.RLock()  # of process, channel and gang; an RLock, as a signal may close inside a start

    def __enter__(self) -> Self:
        with self._lock:
            self._is_closed = False
            self._spawn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs that will fork; another one would import its modules anew."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self, order: GangOrder, terminal_fd: int | None = None) -> Gang:
        """Fork a gang. terminal_fd: becomes the streams of `order.debug_rank`.

        Raises PhalanxError when a preloaded module cannot be imported or starts threads, or `order.address` is none of
        this host's, GangBusyError while a gang lives, OutsideError when the server does not answer within its deadline,
        ends or is closed before it has, or the host cannot fork.
        """
        assert (terminal_fd is None) == (order.debug_rank is None), "a debug rank and its terminal come together"
        with self._lock:
            self._refuse_closed()
            if self._gang is not None and not self._gang.over:
                raise GangBusyError("end the gang that lives before starting another")
            try:
                self._ensure_ready()
                order.log_dir.mkdir(parents=True, exist_ok=True)
                self._gang = self._order_gang(order, terminal_fd)
            except ConnectionError as error:
                self._end()
                self._refuse_closed()
                raise OutsideError(
                    "the fork server ended before it took an order; its messages are on stderr"
                ) from error
            except BaseException:
                self._end()  # whatever was forked in between dies with the server
                raise
            return self._gang

    def close(self) -> None:
        """End the server and every rank of its gang, also while a start is under way; returns when the server is
        gone.
        """
        self._is_closed = True  # before the channel is looked up: a start that opens one looks here next
        _shut_down(self._channel)
        with self._lock:
            self._end()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise OutsideError("the fork server was closed before it had started the gang")

    def _end(self) -> None:
        """As `close`, but the next start makes another server."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            _shut_down(channel)  # also for the gang that still holds its copy
            channel.close()
        if process is None:
            return
        if not self._ready:
            process.kill()  # it has no ranks, and may not look up from its imports for long
        try:
            process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        main_thread = threading.current_thread() is threading.main_thread()
        parent = str(os.getpid() if main_thread else 0)  # the kernel's parent is a thread, and this one may end early
        command = [sys.executable, "-P", "-m", "phalanx.gang.server", str(theirs.fileno()), parent]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=self._environ,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise OutsideError(f"the fork server could not be started: {error}") from error
        self._channel, self._lines, self._ready = ours, LineBuffer(), False
        send_order(ours, {"order": "preload", "modules": self._preload})

    def _ensure_ready(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._spawn()
        if self._ready:
            return
        answer, *_ = self._answer(self._ready_deadline_s)
        if answer["event"] == "import_failed":
            raise PhalanxError(
                f"module {answer['module']}",
                expected="a module that the fork server can import",
                remedy=f"install what is missing, or correct it: {answer['message']}",
            )
        assert answer["event"] == "ready", answer
        self._ready = True

    def _order_gang(self, order: GangOrder, terminal_fd: int | None) -> Gang:
        assert self._channel is not None and self._process is not None
        environ = {**network_environ(order.address), **order.environ}
        reads: list[int] = []
        try:
            with ExitStack() as ours_until_sent:
                writes = []
                for _ in order.local_ranks:
                    read, write = os.pipe()
                    reads.append(read)
                    writes.append(write)
                    ours_until_sent.callback(os.close, write)
                    os.set_blocking(read, False)
                extra, rendezvous = [], order.rendezvous
                if rendezvous is None:
                    listener = ours_until_sent.enter_context(listen(order.address, backlog=4 * order.world_size))
                    rendezvous = Rendezvous(order.address, listener.getsockname()[1])
                    extra.append(listener.fileno())
                fds = [*writes, *extra, *([] if terminal_fd is None else [terminal_fd])]
                message = {
                    "order": "start",
                    "gang": replace(order, environ=environ).to_json(),
                    "rendezvous": asdict(rendezvous),
                    "num_fds": len(fds),
                }
                send_order(self._channel, message, fds)
                answer, *early = self._answer(max(START_DEADLINE_S, self._ready_deadline_s / 2))
            if answer["event"] != "started":
                raise OutsideError(f"the fork server could not start a gang: {answer['reason']}")
        except BaseException:
            for read in reads:
                os.close(read)
            raise
        pids = {int(rank): pid for rank, pid in answer["pids"].items()}
        reports = dict(zip(order.local_ranks, reads, strict=True))
        return Gang(order, rendezvous, pids, self._channel.dup(), self._lines, reports, self._process.kill, early)

    def _answer(self, deadline_s: float) -> list[dict[str, Any]]:
        """The server's next message, and those that came on its heels."""
        assert self._channel is not None
        end_s = time.monotonic() + deadline_s
        while True:
            self._refuse_closed()
            if not is_readable(self._channel, max(0.0, end_s - time.monotonic())):
                remedy = f"; {self._remedy}" if self._remedy else ""
                raise OutsideError(f"the fork server gave no answer within {deadline_s:g} s{remedy}")
            data, _ = receive(self._channel)
            if not data:
                self._refuse_closed()
                code = self._process.wait() if self._process is not None else None
                raise OutsideError(f"the fork server ended with {code} before it answered; its messages are on stderr")
            messages = self._lines.feed(data)
            if messages:
                return messages


def _shut_down(channel: socket.socket | None) -> None:
    """Ends a channel for both sides and wakes whoever waits on it; its number stays taken until it is closed."""
    if channel is not None:
        with suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)
