"""The fork servers of this node: one for each job and digest of code, so that a gang starts in about a second."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import ForkServer, Gang, GangOrder

MOST_IDLE = 2
AWAITED_S = 60.0  # from a job's check to its start train opens an attempt, which takes seconds
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Server:
    """A fork server. awaited_until_s: until when its job is expected to start, by the clock of `ForkServers`.
    num_starting: starts under way. gang: the last one that it started.
    """

    server: ForkServer
    code_digest: str
    awaited_until_s: float = -math.inf
    num_starting: int = 0
    gang: Gang | None = None

    def holds(self, code_digest: str) -> bool:
        """Whether it lives and has imported that code; one that is started anew may find other code on the disk."""
        return self.code_digest == code_digest and self.server.is_alive

    @property
    def is_in_use(self) -> bool:
        """Whether ranks of it live, or are being started."""
        return self.num_starting > 0 or (self.gang is not None and not self.gang.over)

    def is_idle(self, now_s: float) -> bool:
        """Whether nobody uses it, and no job is about to."""
        return not self.is_in_use and now_s >= self.awaited_until_s


class ForkServers:
    """Fork servers by job, each with the digest of the code that it holds. Safe from any thread.

    digest_now: the digest of the code that lies on this node now, with a user's own; it is asked whenever a server is
    missing or holds other code than is wanted. Idle servers beyond MOST_IDLE are ended, the least recently used first;
    one whose ranks live or are being started, or whose job was checked less than AWAITED_S ago and has not started
    yet, is not idle, so there may be as many servers as there are such jobs. No server is closed under the lock.
    """

    def __init__(
        self,
        preload: Sequence[str],
        digest_now: Callable[[Sequence[str]], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._preload, self._digest_now, self._clock = tuple(preload), digest_now, clock
        self._servers: OrderedDict[str, _Server] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that have a server, the least recently used first."""
        with self._lock:
            return tuple(self._servers)

    def warm(self, job: str, code_digest: str) -> None:
        """Starts the job's server, unless one that holds this code is there; its imports go on by themselves."""
        old = None
        with self._lock:
            held = self._servers.get(job)
            if self._is_closed or (held is not None and held.is_in_use):
                return  # the gang of an older attempt still lives: its end comes with the next start
            if held is None or not held.holds(code_digest):
                held, old = self._replaced(job, code_digest)
            held.awaited_until_s = self._clock() + AWAITED_S
            self._servers.move_to_end(job)
        if old is not None:
            old.server.close()
        self._end_idle()

    def start(self, job: str, code_digest: str, own_code: Sequence[str], order: GangOrder) -> Gang:
        """Forks a gang with code of that digest. Raises PhalanxError where this node has other code, OutsideError where
        the job is released or these servers are closed meanwhile, and what `ForkServer.start` raises.
        """
        held = self._taken(job, code_digest)
        if held is None:
            self._check_code(job, code_digest, own_code)
            held = self._taken(job, code_digest, may_replace=True)
            assert held is not None
        try:
            held.gang = held.server.start(order)
            return held.gang
        finally:
            with self._lock:
                held.num_starting -= 1
                held.awaited_until_s = -math.inf
            self._end_idle()

    def _taken(self, job: str, code_digest: str, *, may_replace: bool = False) -> _Server | None:
        """The server of the job for a start, which the caller counts off; None where it has other code or none."""
        old = None
        with self._lock:
            if self._is_closed:
                raise OutsideError(f"{job} does not start: this agent ends")
            held = self._servers.get(job)
            if held is None or not held.holds(code_digest):
                if not may_replace:
                    return None
                held, old = self._replaced(job, code_digest)
            held.num_starting += 1
            self._servers.move_to_end(job)
        if old is not None:
            old.server.close()
        return held

    def _check_code(self, job: str, code_digest: str, own_code: Sequence[str]) -> None:
        found = self._digest_now(own_code)
        if found != code_digest:
            raise PhalanxError(
                f"code of this node for {job}",
                value=found,
                expected=f"{code_digest}, with which the attempt was opened",
                remedy="install the same version of Phalanx and of the job's own code on every node",
            )

    def _replaced(self, job: str, code_digest: str) -> tuple[_Server, _Server | None]:
        """A fresh server in the place of the job's old one, which the caller closes: it ends with its ranks."""
        server = ForkServer(self._preload, remedy="free the processors of this node")
        server.__enter__()
        old = self._servers.get(job)
        self._servers[job] = _Server(server, code_digest)
        return self._servers[job], old

    def _end_idle(self) -> None:
        with self._lock:
            now_s = self._clock()
            idle = [job for job, held in self._servers.items() if held.is_idle(now_s)]
            surplus = [(job, self._servers.pop(job)) for job in idle[: max(0, len(idle) - MOST_IDLE)]]
        for job, held in surplus:
            LOG.info("the fork server of %s ends: it has been idle the longest", job)
            held.server.close()

    def release(self, job: str) -> None:
        """Ends the job's server, and its ranks if there are any; a start that is under way fails."""
        with self._lock:
            held = self._servers.pop(job, None)
        if held is not None:
            held.server.close()

    def close(self) -> None:
        """Ends all servers, and every rank with them; none begins any more."""
        with self._lock:
            self._is_closed = True
        for job in self.jobs:
            self.release(job)
