"""Takes shares of other nodes into this node's memory."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from contextlib import suppress
from typing import Final

from phalanx.agent.replica_wire import SILENT_S, Wire, context_of, head_of
from phalanx.agent.replicas import Head, ReplicaMemory, check_digests, new_memory
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage.registry import JobName
from phalanx.rpc.config import Security
from phalanx.rpc.tokens import AGENTS, Verifier

MAX_DEADLINE_S: Final = 3600.0
MOST_AT_ONCE: Final = 64
LOG = logging.getLogger(__name__)


class ReplicaServer:
    """Listens from its making until `close`. host: this node's address for others. Each connection brings one share."""

    def __init__(self, memory: ReplicaMemory, security: Security, host: str) -> None:
        self._memory = memory
        self._context = context_of(security.credentials, is_server=True)
        self._verifier = Verifier.load(security.token_key)
        self._socket = socket.create_server((host, 0), backlog=MOST_AT_ONCE)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._is_closed = False
        threading.Thread(target=self._listen, name="replica-listen", daemon=True).start()

    def close(self) -> None:
        """Takes no more; what comes in at this moment ends with the process."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                plain, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    LOG.warning("a connection of another node was not taken: %s", error)
                continue
            if not self._places.acquire(blocking=False):
                LOG.warning("more than %d shares at once: one is refused", MOST_AT_ONCE)
                plain.close()
                continue
            threading.Thread(target=self._serve, args=(plain,), name="replica-take", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(SILENT_S)
            with plain, self._context.wrap_socket(plain, server_side=True) as connection:
                wire = Wire(connection, MAX_DEADLINE_S)
                wire.require_agent()
                try:
                    self._take(wire)
                except PhalanxError as error:
                    wire.say({"error": str(error)})
                except OutsideError as error:
                    with suppress(OutsideError):
                        wire.say({"error": str(error)})
                    raise
                else:
                    wire.say({})
        except (OutsideError, ssl.SSLError, OSError) as error:
            LOG.warning("a share of another node did not come: %s", error)
        except Exception:
            LOG.exception("a share of another node did not come")
        finally:
            self._places.release()

    def _take(self, wire: Wire) -> None:
        fields = wire.hear()
        head = head_of(fields)
        self._require_token(str(fields.get("token", "")), head)
        try:
            wire.shorten(float(fields.get("deadline_s", MAX_DEADLINE_S)))
        except (TypeError, ValueError) as error:
            raise OutsideError("the deadline of a share is no number") from error
        self._memory.begin(head)
        try:
            held = new_memory(head)
            for each in head.objects:
                with held.view(each) as view:
                    wire.receive(view)
            check_digests(held)
            self._memory.finish(held)
        finally:
            self._memory.give_up(head)

    def _require_token(self, token: str, head: Head) -> None:
        """Raises PhalanxError unless the token was made for the attempt that it is sent for."""
        caller, name = self._verifier.verify(token), JobName.parse(head.job)
        caller.require_job(name.project, name.uid, head.kept.ref.attempt)
        if caller.role not in AGENTS or not caller.attempt:
            raise PhalanxError(
                "token of a share",
                value=f"{caller.role}, attempt {caller.attempt}",
                expected=f"one for attempt {head.kept.ref.attempt}",
                remedy="use the token that came with the order to start the gang",
            )
