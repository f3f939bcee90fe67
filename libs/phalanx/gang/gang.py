"""The parent's hold on a running gang: its events merged, signals to it, its stacks, its end and the first cause of it.

Nothing here needs to be called for a failed gang to end: the fork server ends the peers of a dead rank by itself.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.core.errors import OutsideError
from phalanx.gang.cause import Cause, first_cause, is_bad
from phalanx.gang.order import ENDING_SIGNALS, RETURNED, Event, GangOrder, RankExit, Rendezvous
from phalanx.gang.wire import CHUNK_BYTES, LineBuffer, receive, send_order

KILL_DEADLINE_S = 15.0
LOST_SERVER_DEADLINE_S = 5.0
_STACK_SETTLE_S = 0.05
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GangOutcome:
    """How a gang ended.

    state: ok (every rank returned), stopped (it ended on request; first_cause is None when it committed first,
    `interrupted` when it was not left the time), failed.
    exits: of the ranks whose end was seen, in that order. attempts: how many gangs a supervisor ran, this one included.
    """

    state: Literal["ok", "stopped", "failed"]
    first_cause: Cause | None
    exits: tuple[RankExit, ...]
    attempts: int = 1

    @property
    def ok(self) -> bool:
        return self.state == "ok"


class Gang:
    """The ranks of one order, alive or ended. Made by `ForkServer.start`; not safe for several threads.

    rendezvous: where rank 0 listens. channel: its own copy of the fork server's. reports: the reading ends of the
    ranks' pipes. early: exits that came already.
    """

    def __init__(
        self,
        order: GangOrder,
        rendezvous: Rendezvous,
        pids: Mapping[int, int],
        channel: socket.socket,
        lines: LineBuffer,
        reports: Mapping[int, int],
        kill_server: Callable[[], None],
        early: Iterable[dict[str, Any]] = (),
    ) -> None:
        self.order, self.rendezvous, self.pids = order, rendezvous, dict(pids)
        self._kill_server, self._killed_server = kill_server, False
        self._channel, self._lines = channel, lines
        self._reports = dict(reports)
        self._buffers = {rank: LineBuffer() for rank in self._reports}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        for rank, fd in self._reports.items():
            self._selector.register(fd, selectors.EVENT_READ, rank)
        self._queue: deque[Event] = deque()
        self._errors: list[Event] = []
        self._exits: list[RankExit] = []
        self._returned: set[int] = set()
        self._said_stopped = self._asked_to_end = False
        self._server_lost_s: float | None = None
        self._because: Cause | None = None
        self.over = False
        self._take_exits(early)

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks whose end has not been seen."""
        ended = {death.rank for death in self._exits}
        return tuple(rank for rank in sorted(self.pids) if rank not in ended)

    @property
    def failing(self) -> bool:
        """Whether a rank has raised or ended badly: its peers are being ended."""
        return bool(self._errors) or any(is_bad(death, self._returned) for death in self._exits)

    def events(self, timeout_s: float) -> Iterator[Event]:
        """What ranks report and how they end, as it comes, for `timeout_s` or until the gang is over and all told."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            while self._queue:
                yield self._queue.popleft()
            remaining_s = deadline_s - time.monotonic()
            if self.over or remaining_s < 0:
                return
            self._pump(remaining_s)

    def signal(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to ranks (None: all alive); those that ended are passed over."""
        if self.over or self._server_lost_s is not None:
            return
        if signum in ENDING_SIGNALS:
            self._asked_to_end = True
        try:
            send_order(
                self._channel,
                {"order": "signal", "signum": int(signum), "ranks": None if ranks is None else sorted(ranks)},
            )
        except (BrokenPipeError, ConnectionResetError):
            LOG.warning("the fork server is gone; its ranks end with it")

    def stacks(self, deadline_s: float) -> dict[int, str]:
        """The Python stacks of all threads of the living ranks, also of those blocked in C. A rank that gives none is
        left out.
        """
        before = {rank: self._stack_bytes(rank) for rank in self.alive}
        self.signal(signal.SIGUSR2)
        end_s = time.monotonic() + deadline_s
        sizes, settled_s = dict(before), time.monotonic()
        while time.monotonic() < end_s and not self.over:
            self._pump(_STACK_SETTLE_S / 5)
            now = {rank: self._stack_bytes(rank) for rank in before}
            if now != sizes:
                sizes, settled_s = now, time.monotonic()
            waiting = [rank for rank in self.alive if sizes.get(rank, 0) == before.get(rank, 0)]
            if not waiting and time.monotonic() - settled_s > _STACK_SETTLE_S:
                break
        return {rank: self._stack_text(rank, start) for rank, start in before.items() if sizes[rank] > start}

    def end(self, grace_s: float, because: Cause | None = None) -> GangOutcome:
        """End the gang: SIGTERM, then SIGKILL after `grace_s` (0: at once). because: the cause, where the caller knows
        it.

        Raises OutsideError when a rank survives SIGKILL (blocked in the kernel).
        """
        self._because = self._because or because
        for signum, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_DEADLINE_S)):
            if patience_s > 0 and not self.over:
                self.signal(signum)
                self._pump_until_over(patience_s)
        if not self.over:  # the server itself does not answer (stopped, say): its ranks die with it
            self._killed_server = True
            self._kill_server()
            self._pump_until_over(2 * LOST_SERVER_DEADLINE_S)
        if not self.over:
            raise OutsideError(f"ranks {self.alive} (pids {[self.pids[rank] for rank in self.alive]}) survive SIGKILL")
        return self.outcome()

    def outcome(self) -> GangOutcome:
        """How the gang ended; only once it is over."""
        assert self.over, "the gang is still alive"
        cause = self._because or first_cause(self._errors, self._exits, self._returned) or self._lost_server_cause()
        exits = tuple(self._exits)
        if self._asked_to_end and self._because is None and (cause is None or cause.kind == "lost_peer"):
            all_returned = len(exits) == len(self.pids) and all(death.exit_code == 0 for death in exits)
            cause = (
                None if all_returned else Cause("interrupted", None, "ended on request before every rank had returned")
            )
            return GangOutcome("stopped" if cause or self._said_stopped else "ok", cause, exits)
        if cause is not None:
            return GangOutcome("failed", cause, exits)
        return GangOutcome("stopped" if self._said_stopped else "ok", None, exits)

    def _lost_server_cause(self) -> Cause | None:
        if self._server_lost_s is None or self._killed_server:
            return None
        return Cause("process_death", None, "the fork server died, and its ranks with it")

    def _pump_until_over(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.over and (remaining_s := deadline_s - time.monotonic()) > 0:
            self._pump(remaining_s)

    def _pump(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for something, and take in all that is there."""
        if self._server_lost_s is not None:
            timeout_s = min(timeout_s, 0.1)
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._read_channel()
            else:
                self._read_report(key.data)
        self._finish_if_over()

    def _read_channel(self) -> None:
        data, _ = receive(self._channel)
        if not data:
            self._server_lost_s = time.monotonic()
            self._selector.unregister(self._channel)
            self._queue.append(Event(None, "server_lost", {}, self._server_lost_s))
            return
        self._take_exits(self._lines.feed(data))

    def _take_exits(self, messages: Iterable[dict[str, Any]]) -> None:
        for message in messages:
            assert message["event"] == "exit", message
            fields = {name: message[name] for name in message if name not in ("event", "rank", "time_monotonic_s")}
            event = Event(message["rank"], "exit", fields, message["time_monotonic_s"])
            self._exits.append(RankExit.from_event(event))
            self._queue.append(event)

    def _read_report(self, rank: int) -> bool:
        """Take in one chunk of a rank's reports; False when there was none."""
        try:
            data = os.read(self._reports[rank], CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_report(rank)
            return False
        for message in self._buffers[rank].feed(data):
            event = Event(rank, message["kind"], message["fields"], message["time_monotonic_s"])
            if event.kind == RETURNED:
                self._returned.add(rank)
                continue
            if event.kind == "error":
                self._errors.append(event)
            self._said_stopped |= event.kind == "stopped"
            self._queue.append(event)
        return True

    def _close_report(self, rank: int) -> None:
        if self._buffers[rank].num_pending_bytes:
            LOG.warning("rank %d ended within a report", rank)
        self._selector.unregister(self._reports[rank])
        os.close(self._reports.pop(rank))

    def _finish_if_over(self) -> None:
        if self.over:
            return
        if self._server_lost_s is None:
            ended = not self.alive
        else:  # nobody tells of exits any more: a closed pipe means that its rank is gone
            ended = not self._reports or time.monotonic() > self._server_lost_s + LOST_SERVER_DEADLINE_S
        if not ended:
            return
        for rank in list(self._reports):
            while self._read_report(rank):
                pass
            if rank in self._reports:  # a process that the rank left behind still holds the pipe
                self._close_report(rank)
        self._selector.close()
        self._channel.close()
        self.over = True

    def _stack_bytes(self, rank: int) -> int:
        path = self.order.stack_path(rank)
        return path.stat().st_size if path.exists() else 0

    def _stack_text(self, rank: int, start: int) -> str:
        with self.order.stack_path(rank).open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
