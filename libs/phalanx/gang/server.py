"""The fork server: imports once, stays single-threaded, forks the ranks of one gang at a time, reaps them and says how
they ended.

`python -m phalanx.gang.server FD PARENT_PID` serves the orders that come over the inherited socket FD:
    preload  modules                      -> ready | import_failed
    start    gang, rendezvous, fds beside -> started | refused
    signal   signum, ranks                (no answer)
and tells of every rank that ended (`exit`). When a rank ends badly, its peers get SIGTERM after a second, in which they
may say what they saw, and SIGKILL two seconds later. When the parent is gone, all ranks are killed and the server ends.
Ranks die with the server. It ignores SIGINT, SIGTERM and SIGHUP: a service manager that signals every process of a job
must leave the ranks time to commit.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from phalanx.gang import linux, rank
from phalanx.gang.order import ENDING_SIGNALS, GangOrder, Rendezvous
from phalanx.gang.wire import LineBuffer, receive, send_order

PEER_TERM_AFTER_S = 1.0
PEER_KILL_AFTER_S = 3.0
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """The gang that lives now. kill_plan: (when, signal) still due against the peers of a rank that ended badly."""

    rank_of: dict[int, int]
    oom_kills_before: int | None
    sent: dict[int, set[int]] = field(default_factory=dict)
    kill_plan: list[tuple[float, int]] | None = None


class Server:
    """One channel, at most one gang."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lines, self._fds = channel, LineBuffer(), list[int]()
        self._gang: _Running | None = None
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector = selectors.PollSelector()
        for source in (channel, self._wake_read):
            self._selector.register(source, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, _noop)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the parent is gone."""
        try:
            while self._turn():
                pass
        except BrokenPipeError:
            LOG.info("the parent is gone")
        self._kill_all()

    def _turn(self) -> bool:
        readable = {key.fileobj for key, _ in self._selector.select(self._until_next_kill_s())}
        if self._wake_read in readable:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        self._reap()  # before any order: what died by itself must not count as killed by us
        if self._channel in readable:
            data, fds = receive(self._channel)
            if not data:
                return False
            self._fds += fds
            for message in self._lines.feed(data):
                self._obey(message)
        self._reap()
        self._follow_kill_plan()
        return True

    def _say(self, event: str, **fields: Any) -> None:
        send_order(self._channel, {"event": event, "time_monotonic_s": time.monotonic(), **fields})

    def _obey(self, message: Mapping[str, Any]) -> None:
        match message["order"]:
            case "preload":
                self._preload(message["modules"])
            case "start":
                fds, self._fds = self._fds[: message["num_fds"]], self._fds[message["num_fds"] :]
                self._start(GangOrder.from_json(message["gang"]), Rendezvous(**message["rendezvous"]), fds)
            case "signal":
                self._signal(message["signum"], message["ranks"])
            case other:
                raise ValueError(f"unknown order {other!r}")

    def _preload(self, modules: Sequence[str]) -> None:
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                LOG.exception("preload of %s", module)
                self._say("import_failed", module=module, message=f"{type(error).__name__}: {error}")
                return
            names = linux.thread_names()
            if len(names) > 1 or threading.active_count() > 1:
                self._say(
                    "import_failed", module=module, message=f"it starts threads ({', '.join(names)}): unsafe to fork"
                )
                return
        gc.collect()
        gc.freeze()
        self._say("ready")

    def _start(self, order: GangOrder, rendezvous: Rendezvous, fds: Sequence[int]) -> None:
        """fds: one report pipe a rank, the listening socket where rank 0 is here, the terminal for a debug rank."""
        try:
            if self._gang is not None:
                self._say("refused", reason="a gang is still alive")
                return
            names = linux.thread_names()
            assert len(names) == 1, f"the fork server has threads: {names}"
            self._gang = _Running({}, linux.oom_kills())
            for number in order.local_ranks:
                self._fork(order, number, rendezvous, fds)
            self._say("started", pids={str(seat): pid for pid, seat in self._gang.rank_of.items()})
        except OSError as error:
            self._kill_all()
            self._say("refused", reason=f"fork: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, order: GangOrder, number: int, rendezvous: Rendezvous, fds: Sequence[int]) -> None:
        assert self._gang is not None
        here = order.local_ranks
        terminal = fds[-1] if order.debug_rank == number else None
        listen = fds[len(here)] if number == 0 else None
        report = fds[here.index(number)]
        seat = rank.Seat(order, number, report, rendezvous, listen, terminal, server_pid=os.getpid())
        pid = os.fork()
        if pid == 0:
            not_mine = {*fds, self._channel.fileno(), self._wake_read, self._wake_write} - set(seat.fds())
            rank.run(seat, not_mine)
        with suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(pid, pid)
        self._gang.rank_of[pid] = number

    def _signal(self, signum: int, ranks: Sequence[int] | None) -> None:
        if self._gang is None:
            return
        for pid, number in self._gang.rank_of.items():
            if ranks is None or number in ranks:
                if signum in ENDING_SIGNALS:
                    self._gang.sent.setdefault(number, set()).add(signum)
                os.kill(pid, signum)  # a zombie at worst: only this process reaps

    def _reap(self) -> None:
        """Collect every rank that ended, with whatever it had started in its process group."""
        while self._gang is not None:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)  # before the reaping, while the number is surely ours
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid in self._gang.rank_of:
                self._rank_ended(ended.si_pid, os.waitstatus_to_exitcode(status))

    def _rank_ended(self, pid: int, code: int) -> None:
        assert self._gang is not None
        gang, now_s = self._gang, time.monotonic()
        number = gang.rank_of.pop(pid)
        died_of = -code if code < 0 else None
        self._say(
            "exit",
            rank=number,
            pid=pid,
            exit_code=code if code >= 0 else None,
            signal=died_of,
            sent_by_us=died_of in gang.sent.get(number, set()),
            oom_kills=(linux.oom_kills() or 0) - (gang.oom_kills_before or 0),
        )
        if code != 0 and gang.kill_plan is None:
            gang.kill_plan = [(now_s + PEER_TERM_AFTER_S, signal.SIGTERM), (now_s + PEER_KILL_AFTER_S, signal.SIGKILL)]
        if not gang.rank_of:
            self._gang = None

    def _until_next_kill_s(self) -> float | None:
        if self._gang is None or not self._gang.kill_plan:
            return None
        return max(0.0, self._gang.kill_plan[0][0] - time.monotonic())

    def _follow_kill_plan(self) -> None:
        if self._until_next_kill_s() == 0.0:
            assert self._gang is not None and self._gang.kill_plan
            _, signum = self._gang.kill_plan.pop(0)
            self._signal(signum, None)

    def _kill_all(self) -> None:
        pids = list(self._gang.rank_of) if self._gang is not None else []
        for pid in pids:
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        self._gang = None


def _noop(signum: int, frame: object) -> None:
    """A handler, so that the wake-up descriptor is written."""


def main(arguments: Sequence[str]) -> None:
    """Serve until the parent is gone; the parent's death while a module is being imported kills at once."""
    fd, parent_pid = (int(argument) for argument in arguments)
    logging.basicConfig(level=logging.WARNING, format="fork server: %(message)s")
    if parent_pid:
        linux.die_with_parent(parent_pid)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    Server(socket.socket(fileno=fd)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
