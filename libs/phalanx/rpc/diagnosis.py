"""Why a connection fails, in one line: gRPC says "Socket closed" for most of it.

A second handshake by Python's own TLS tells whose certificate was refused; the files tell why.
"""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.config import Credentials, split_address
from phalanx.rpc.errors import NotUp, Unauthenticated, Unavailable
from phalanx.rpc.pki import is_issued_by, read_certificate
from phalanx.rpc.status import Called

PROBE_S = 2.0
_NEVER_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "empty address list")
_REISSUE = "remove it and run `phalanx up`, which issues a new one"


def connection_error(called: Called, text: str, credentials: Credentials | None) -> PhalanxError | OutsideError:
    """What gRPC's words for UNAVAILABLE mean. credentials: None on a Unix socket."""
    if not any(words in text for words in _NEVER_CONNECTED):
        return Unavailable(f"{called} went away: {text}")
    if credentials is not None and ("handshake" in text or "closed" in text or "reset" in text):
        problem = tls_problem(called, credentials)
        if problem is not None:
            return problem
    reason = text.rsplit(": ", 1)[-1].strip().lower() or "no answer"
    return NotUp(f"{called} is not up ({reason}); start it with `phalanx up`")


def tls_problem(called: Called, credentials: Credentials) -> PhalanxError | None:
    """What is wrong with the certificates between this client and the service; None when nothing is."""
    host, port = split_address(called.endpoint, f"address of {called.service}")
    host = host.strip("[]")
    try:
        context = _context(credentials)
        with (
            socket.create_connection((host, port), timeout=PROBE_S) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            if tls.recv(1):
                return None
    except ssl.SSLCertVerificationError as error:
        return Unauthenticated(
            f"certificate of {called}",
            expected=f"one that {credentials.ca} vouches for ({error.verify_message})",
            remedy="use the context that belongs to these services, or restart them",
        )
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return Unauthenticated(
                str(called), expected="a service that speaks TLS", remedy="check the address: something else listens"
            )
        if "ALERT" not in (error.reason or ""):
            return Unauthenticated(f"TLS with {called}", expected=f"a handshake ({error.reason})", remedy=_REISSUE)
    except OSError:
        return None
    return _refused(called, credentials)


def _context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(credentials.ca)
    context.load_cert_chain(credentials.cert, credentials.key)
    context.set_alpn_protocols(["h2"])
    return context


def _refused(called: Called, credentials: Credentials) -> PhalanxError:
    """The service closed the connection after it saw this client's certificate."""
    cert, now = read_certificate(credentials.cert), datetime.now(UTC)
    if cert.not_valid_after_utc < now:
        why = f"one that is not expired (it ended at {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC)"
    elif cert.not_valid_before_utc > now:
        why = f"one that is valid already (from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC)"
    elif not is_issued_by(cert, read_certificate(credentials.ca)):
        why = f"one that the authority of {called} issued"
    else:
        why = f"one that {called} accepts; its log says why not"
    return Unauthenticated(f"certificate {credentials.cert}", expected=why, remedy=_REISSUE)
