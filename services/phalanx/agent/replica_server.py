"""Takes shares of other nodes into this node's memory, and gives nodes that need them bytes of those that lie here."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from phalanx.agent.replica_wire import SILENT_S, Wire, context_of, head_of
from phalanx.agent.replicas import Head, Held, ReplicaMemory, check_digest, check_digests
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import keys
from phalanx.lineage.registry import JobName
from phalanx.rpc.config import Security
from phalanx.rpc.tokens import AGENTS, Verifier
from phalanx.snapshot.replicas import Placed

MAX_DEADLINE_S: Final = 3600.0
MOST_AT_ONCE: Final = 256
READ_S: Final = 30.0
LOG = logging.getLogger(__name__)


class ReplicaServer:
    """Listens from its making until `close`. host: this node's address for others. Each connection brings one share,
    or asks for bytes of those that lie here, one piece after the other.
    """

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
                fields = wire.hear()
                if "read" in fields:
                    self._give(connection, fields)
                    return
                try:
                    self._take(wire, fields)
                except PhalanxError as error:
                    wire.say({"error": str(error)})
                except OutsideError as error:
                    with suppress(OutsideError):
                        wire.say({"error": str(error)})
                    raise
                else:
                    wire.say({})
        except (OutsideError, ssl.SSLError, OSError) as error:
            LOG.warning("a share did not come from another node, or go there: %s", error)
        except Exception:
            LOG.exception("a share did not come from another node, or go there")
        finally:
            self._places.release()

    def _take(self, wire: Wire, fields: Mapping[str, Any]) -> None:
        head = head_of(fields)
        self._require_token(str(fields.get("token", "")), head)
        try:
            wire.shorten(float(fields.get("deadline_s", MAX_DEADLINE_S)))
        except (TypeError, ValueError) as error:
            raise OutsideError("the deadline of a share is no number") from error
        self._memory.begin(head)
        try:
            held = self._memory.fresh(head)
            for each in head.objects:
                with held.view(each) as view:
                    wire.receive(view)
            check_digests(held)
            self._memory.finish(held)
        finally:
            self._memory.give_up(head)

    def _give(self, connection: ssl.SSLSocket, fields: Mapping[str, Any]) -> None:
        """Answers what is asked for, until nothing more is."""
        asked: Mapping[str, Any] | None = fields
        while asked is not None:
            wire = Wire(connection, READ_S)
            try:
                held, placed, place = self._found(asked)
            except (PhalanxError, OutsideError) as error:
                wire.say({"error": str(error)})
            else:
                wire.say({"num_bytes": placed.ref.num_bytes})
                with held.view(placed) as view:
                    wire.send(view[place])
            asked = wire.hear_next()

    def _found(self, asked: Mapping[str, Any]) -> tuple[Held, Placed, slice]:
        """What is asked for, with its digest checked: a reader could not tell damage of memory from damage of the
        checkpoint. Raises PhalanxError where it may not be given or does not lie here, OutsideError for damage.
        """
        try:
            job, key, token = str(asked["job"]), str(asked["read"]), str(asked["token"])
            offset, length = int(asked["offset"]), int(asked["length"])
        except (KeyError, TypeError, ValueError) as error:
            raise PhalanxError("request for a share", expected="job, read, token, offset, length", remedy="") from error
        name, caller = JobName.parse(job), self._verifier.verify(token)
        caller.require_job(name.project, name.uid)
        ref = keys.checkpoint_of(key)
        if caller.role not in AGENTS or ref is None or caller.attempt < ref.attempt:
            raise PhalanxError(
                "token of a reader",
                value=f"{caller.role}, attempt {caller.attempt}",
                expected="one for the attempt of the share or a later one",
                remedy="use the token that came with the order to start the gang",
            )
        for held in self._memory.held(job, ref):
            for placed in held.head.objects:
                if placed.ref.key == key:
                    if not 0 <= offset <= offset + length <= placed.ref.num_bytes:
                        raise PhalanxError(key, value=f"{offset}+{length}", expected="bytes in it", remedy="ask again")
                    check_digest(held, placed)
                    return held, placed, slice(offset, offset + length)
        raise PhalanxError(key, expected="to lie in the memory of this node", remedy="read it from storage")

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
