"""The fork servers of this node: one for each job and digest of code, so that a gang starts in about a second."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.gang import ForkServer, Gang, GangOrder

MOST_IDLE = 2
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Server:
    """A fork server. lock: one start at a time. gang: the last one that it started."""

    server: ForkServer
    code_digest: str
    lock: threading.Lock
    gang: Gang | None = None

    def holds(self, code_digest: str) -> bool:
        """Whether it lives and has imported that code; one that is started anew may find other code on the disk."""
        return self.code_digest == code_digest and self.server.is_alive

    @property
    def is_idle(self) -> bool:
        return self.gang is None or self.gang.over


class ForkServers:
    """Fork servers by job, each with the digest of the code that it holds. Safe from any thread.

    digest_now: the digest of the code that lies on this node now, with a user's own; it is asked whenever a server is
    missing or holds other code than is wanted. Idle servers beyond MOST_IDLE are ended, the least recently used first.
    """

    def __init__(self, preload: Sequence[str], digest_now: Callable[[Sequence[str]], str]) -> None:
        self._preload, self._digest_now = tuple(preload), digest_now
        self._servers: OrderedDict[str, _Server] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self, job: str, code_digest: str) -> None:
        """Starts the job's server, unless one that holds this code is there; its imports go on by themselves."""
        with self._lock:
            held = self._servers.get(job)
            if held is not None and held.holds(code_digest):
                self._servers.move_to_end(job)
                return
            if held is not None and not held.is_idle:
                return  # the gang of an older attempt still lives: its end comes with the next start
            self._put(job, code_digest)
        self._end_idle()

    def start(self, job: str, code_digest: str, own_code: Sequence[str], order: GangOrder) -> Gang:
        """Forks a gang with code of that digest. Raises PhalanxError where this node has other code, and what
        `ForkServer.start` raises.
        """
        held = self._fitting(job, code_digest, own_code)
        with held.lock:
            held.gang = held.server.start(order)
            return held.gang

    def _fitting(self, job: str, code_digest: str, own_code: Sequence[str]) -> _Server:
        with self._lock:
            held = self._servers.get(job)
            if held is not None and held.holds(code_digest):
                self._servers.move_to_end(job)
                return held
        found = self._digest_now(own_code)
        if found != code_digest:
            raise PhalanxError(
                f"code of this node for {job}",
                value=found,
                expected=f"{code_digest}, with which the attempt was opened",
                remedy="install the same version of Phalanx and of the job's own code on every node",
            )
        with self._lock:
            return self._put(job, code_digest)

    def _put(self, job: str, code_digest: str) -> _Server:
        """A fresh server in the place of the job's old one, which ends with its ranks."""
        old = self._servers.pop(job, None)
        if old is not None:
            old.server.close()
        server = ForkServer(self._preload, remedy="free the processors of this node")
        server.__enter__()
        self._servers[job] = _Server(server, code_digest, threading.Lock())
        return self._servers[job]

    def _end_idle(self) -> None:
        with self._lock:
            idle = [job for job, held in self._servers.items() if held.is_idle]
            surplus = [(job, self._servers.pop(job)) for job in idle[: max(0, len(idle) - MOST_IDLE)]]
        for job, held in surplus:
            LOG.info("the fork server of %s ends: it has been idle the longest", job)
            held.server.close()

    def release(self, job: str) -> None:
        """Ends the job's server, and its ranks if there are any."""
        with self._lock:
            held = self._servers.pop(job, None)
        if held is not None:
            held.server.close()

    def close(self) -> None:
        """Ends all servers, and every rank with them."""
        with self._lock:
            jobs = list(self._servers)
        for job in jobs:
            self.release(job)
