"""How a share travels from node to node: over TLS with the certificates of both agents, a head as JSON, then the bytes.

gRPC would copy every byte several times in Python; here they go from the memory of one process into that of the other.
Each side has a deadline for the whole, and is broken off by the end of the other.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

from phalanx.agent.replicas import Head
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.rpc.config import Credentials
from phalanx.rpc.pki import TRUST_DOMAIN
from phalanx.snapshot.replicas import Kept, Placed

MAX_HEAD_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 4 << 20
SILENT_S: Final = 30.0
IDLE_S: Final = 5.0  # a connection on which nothing more is asked for is closed
_LENGTH = struct.Struct(">I")
HOLDER: Final = f"{TRUST_DOMAIN}agent"  # how the name of an agent's certificate begins


class Wire:
    """A TLS connection with a deadline for all that is done on it. Raises OutsideError for what breaks."""

    def __init__(self, connection: ssl.SSLSocket, deadline_s: float) -> None:
        self._connection, self._ends_s = connection, time.monotonic() + deadline_s

    def require_agent(self) -> None:
        """Raises OutsideError unless the other end is an agent of this cluster."""
        shown = self._connection.getpeercert() or {}
        entries: tuple[Any, ...] = tuple(shown.get("subjectAltName", ()))
        names = [str(entry[1]) for entry in entries if entry[0] == "URI"]
        if not any(name.startswith(HOLDER) for name in names):
            raise OutsideError(f"the other end is no agent: {', '.join(names) or 'no name'}")

    def shorten(self, deadline_s: float) -> None:
        """At most so long from now."""
        self._ends_s = min(self._ends_s, time.monotonic() + deadline_s)

    def send(self, data: memoryview) -> None:
        """All of the data."""
        for at in range(0, len(data), PIECE_BYTES):
            self._allow()
            try:
                self._connection.sendall(data[at : at + PIECE_BYTES])
            except OSError as error:
                raise OutsideError(f"the other node broke off: {error}") from error

    def receive(self, into: memoryview) -> None:
        """Exactly so many bytes."""
        at = 0
        while at < len(into):
            self._allow()
            try:
                count = self._connection.recv_into(into[at : at + PIECE_BYTES])
            except OSError as error:
                raise OutsideError(f"the other node broke off: {error}") from error
            if not count:
                raise OutsideError(f"the other node broke off {len(into) - at} bytes before the end")
            at += count

    def say(self, fields: Mapping[str, Any]) -> None:
        """A small message."""
        data = json.dumps(fields, separators=(",", ":")).encode()
        self.send(memoryview(_LENGTH.pack(len(data)) + data))

    def hear(self, begun: bytes = b"") -> dict[str, Any]:
        """The other's small message. begun: bytes of it that have come."""
        length = bytearray(begun.ljust(_LENGTH.size, b"\0"))
        self.receive(memoryview(length)[len(begun) :])
        (count,) = _LENGTH.unpack(length)
        if count > MAX_HEAD_BYTES:
            raise OutsideError(f"the other node announces {count} bytes, more than {MAX_HEAD_BYTES}")
        data = bytearray(count)
        self.receive(memoryview(data))
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise OutsideError("the other node says what is no JSON") from error
        if not isinstance(fields, dict):
            raise OutsideError("the other node says what is no JSON object")
        return fields

    def hear_next(self) -> dict[str, Any] | None:
        """The other's next message; None where it has none any more."""
        self._allow()
        try:
            self._connection.settimeout(IDLE_S)
            first = self._connection.recv(1)
        except OSError:
            return None
        return self.hear(first) if first else None

    def _allow(self) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise OutsideError("the share was not done within its deadline")
        self._connection.settimeout(min(left_s, SILENT_S))


def context_of(credentials: Credentials, *, is_server: bool) -> ssl.SSLContext:
    """TLS 1.3 where both show a certificate of the cluster. The name of the host says nothing: nodes have addresses
    that no certificate knows; the holder's name is asked for instead.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(credentials.cert, credentials.key)
        context.load_verify_locations(credentials.ca)
    except OSError as error:
        raise PhalanxError(
            str(credentials.cert), expected="a certificate with its key", remedy="run `phalanx up`, which makes it"
        ) from error
    return context


def head_fields(head: Head) -> dict[str, Any]:
    """The head as JSON."""
    kept = head.kept
    return {
        "job": head.job,
        "attempt": kept.ref.attempt,
        "step": kept.ref.step,
        "rank": kept.rank,
        "world_size": kept.world_size,
        "sealed": head.sealed,
        "objects": [[each.ref.key, each.ref.num_bytes, each.ref.digest, each.start] for each in head.objects],
        "num_bytes": head.num_bytes,
        "draft": head.draft.hex(),
    }


def head_of(fields: Mapping[str, Any]) -> Head:
    """The inverse. Raises OutsideError for what is none."""
    try:
        ref = CheckpointRef(int(fields["attempt"]), int(fields["step"]))
        objects = tuple(
            Placed(ObjectRef(str(key), int(num_bytes), str(digest)), int(start))
            for key, num_bytes, digest, start in fields["objects"]
        )
        kept = Kept(ref, int(fields["rank"]), int(fields["world_size"]))
        draft = bytes.fromhex(fields["draft"])
        return Head(str(fields["job"]), kept, int(fields["sealed"]), objects, int(fields["num_bytes"]), draft)
    except (KeyError, TypeError, ValueError) as error:
        raise OutsideError(f"the other node announces no share: {error!r}") from error


def opened(address: tuple[str, int], context: ssl.SSLContext, deadline_s: float) -> ssl.SSLSocket:
    """A connection to another agent. Raises OutsideError."""
    try:
        plain = socket.create_connection(address, timeout=min(deadline_s, SILENT_S))
    except OSError as error:
        raise OutsideError(f"{address[0]}:{address[1]} is not reached: {error}") from error
    try:
        return context.wrap_socket(plain)
    except OSError as error:
        plain.close()
        raise OutsideError(f"{address[0]}:{address[1]} does not take our certificate: {error}") from error
