"""Reads bytes of shares that other nodes keep, for ranks that begin where they hold nothing of the job."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from phalanx.agent.replica_wire import Wire, context_of, opened
from phalanx.core.errors import OutsideError
from phalanx.rpc.config import Credentials, split_address

HOLDER_S: Final = 10.0  # a node that takes longer to give one piece is not asked again
LOG = logging.getLogger(__name__)


class ReplicaReader:
    """Asks holders for pieces, each holder by one connection, that is kept for the next piece; one that fails is left
    out until the job's next attempt. Safe from any thread.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], _Line] = {}

    def begin(self, job: str) -> None:
        """Another attempt of the job begins, or the job is over: what was learned of its holders is forgotten."""
        with self._lock:
            lines = [self._lines.pop(each) for each in list(self._lines) if each[0] == job]
        for line in lines:
            line.close()

    def read(
        self,
        job: str,
        holders: Sequence[str],
        token: str,
        key: str,
        offset: int,
        into: memoryview,
        deadline_s: float,
    ) -> int:
        """Fills `into` with the object's bytes from `offset` on; the size of the whole object. holders: host:port, in
        the order in which they are asked. Raises OutsideError that says what each of them answered.
        """
        ends_s, whys = time.monotonic() + deadline_s, []
        asked = {"read": key, "job": job, "token": token, "offset": offset, "length": len(into)}
        for address in holders:
            line = self._line(job, address)
            try:
                return line.read(asked, into, ends_s)
            except OutsideError as error:
                whys.append(f"{address}: {error}")
        raise OutsideError("; ".join(whys) or "no living node is known to keep it")

    def _line(self, job: str, address: str) -> _Line:
        with self._lock:
            return self._lines.setdefault((job, address), _Line(address, self._credentials))


class _Line:
    """To one holder."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._credentials = address, credentials
        self._lock = threading.Lock()
        self._connection: ssl.SSLSocket | None = None
        self._failed = ""

    def close(self) -> None:
        """Ends the connection once no piece is on its way."""
        with self._lock:
            self._drop("the attempt is over")

    def read(self, asked: dict[str, object], into: memoryview, ends_s: float) -> int:
        """See `ReplicaReader.read`. ends_s: monotonic. Raises OutsideError."""
        if not self._lock.acquire(timeout=max(0.0, ends_s - time.monotonic())):
            raise OutsideError("others of this node were still being served")
        try:
            ends_s = min(ends_s, time.monotonic() + HOLDER_S)
            if self._failed:
                raise OutsideError(self._failed)
            if self._connection is not None:
                with suppress(OutsideError):  # it was idle, and may have been closed for that
                    return self._ask(asked, into, ends_s)
                self._close()
            try:
                self._open(ends_s - time.monotonic())
                return self._ask(asked, into, ends_s)
            except OutsideError as error:
                self._drop(str(error))
                LOG.warning("the node at %s gives nothing of what it keeps: %s", self._address, error)
                raise
        finally:
            self._lock.release()

    def _open(self, deadline_s: float) -> None:
        address = split_address(self._address, "address of a holder")
        self._connection = opened(address, context_of(self._credentials, is_server=False), deadline_s)

    def _ask(self, asked: dict[str, object], into: memoryview, ends_s: float) -> int:
        assert self._connection is not None
        wire = Wire(self._connection, ends_s - time.monotonic())
        wire.require_agent()
        wire.say(asked)
        answer = wire.hear()
        if "num_bytes" not in answer:
            raise OutsideError(str(answer.get("error", "no answer")))
        wire.receive(into)
        return int(answer["num_bytes"])

    def _drop(self, why: str) -> None:
        self._failed = why
        self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
