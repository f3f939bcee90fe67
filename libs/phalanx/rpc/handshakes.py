"""Refusals that TLS makes, on record too: no certificate, a foreign one, an expired one, plain text.

gRPC ends such a connection inside its core, before any code of ours, and writes one line to stderr. Where stderr is a
file (as under `phalanx up`), that line is found there and audited; elsewhere the line itself is the record. The core
does not say who called.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from typing import BinaryIO

from phalanx.rpc.audit import audit_refusal
from phalanx.rpc.metrics import CallMetrics

LOOK_EVERY_S = 1.0
MAX_READ_BYTES = 2**20
_LINE = re.compile(rb"^[IWE]\d{4} .*Handshake failed with error \w+: (.*)$")
_WHY = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "certificate has expired": "an expired certificate",
    "certificate is not yet valid": "a certificate that is not valid yet",
    "unable to get local issuer certificate": "a certificate of another authority",
    "self-signed certificate": "a certificate of another authority",
    "WRONG_VERSION_NUMBER": "no TLS",
    "HTTP_REQUEST": "no TLS",
}


class HandshakeAudit:
    """Looks at this process's own stderr until closed; does nothing where that is no file."""

    def __init__(self, metrics: CallMetrics) -> None:
        self._metrics = metrics
        self._over = threading.Event()
        self._file = _own_stderr()
        self._rest = b""
        self._thread = threading.Thread(target=self._look, name="phalanx-handshakes", daemon=True)
        if self._file is not None:
            self._thread.start()

    def close(self) -> None:
        """Looks a last time, and ends."""
        self._over.set()
        if self._file is not None:
            self._thread.join()
            self._file.close()

    def _look(self) -> None:
        assert self._file is not None
        is_last = False
        while not is_last:
            is_last = self._over.wait(LOOK_EVERY_S)
            for line in self._new_lines(self._file):
                found = _LINE.match(line)
                if found:
                    self._metrics.refusals.labels("handshake", "UNAVAILABLE").inc()
                    audit_refusal(method="handshake", peer="", spiffe_id="", subject="", why=why(found[1].decode()))

    def _new_lines(self, file: BinaryIO) -> list[bytes]:
        """The whole lines written since the last look; a file that was emptied is read from its start."""
        if os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
            self._rest = b""
        *lines, self._rest = (self._rest + file.read(MAX_READ_BYTES)).split(b"\n")
        self._rest = self._rest[-MAX_READ_BYTES:]
        return lines


def why(reason: str) -> str:
    """The core's words in ours."""
    return "TLS handshake with " + next((text for words, text in _WHY.items() if words in reason), reason)


def _own_stderr() -> BinaryIO | None:
    """This process's stderr, to be read from its end; None where it is no file."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return None
        file = os.fdopen(os.open("/proc/self/fd/2", os.O_RDONLY), "rb", buffering=0)
    except OSError:
        return None
    file.seek(0, os.SEEK_END)
    return file
