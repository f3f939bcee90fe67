"""Whether an address can be listened on, told before gRPC tries and prints its own words."""

from __future__ import annotations

import errno
import socket

from phalanx.core.errors import PhalanxError


def refuse_taken(host: str, port: int, name: str) -> None:
    """Raises PhalanxError when `name` cannot listen there: the port is in use, or the host is not of this machine."""
    where = f"address of {name}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise PhalanxError(
            where,
            value=f"{host}:{port}",
            expected="a free port" if taken else f"an address of this machine ({error.strerror})",
            remedy="end the process that uses it, or choose another port" if taken else "correct the address",
        ) from error
