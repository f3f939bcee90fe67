"""Under which address and through which interface the ranks of one host reach those of others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from phalanx.core.errors import PhalanxError
from phalanx.gang import linux


def listen(address: str, backlog: int) -> socket.socket:
    """A listening TCP socket on a free port of `address`. Raises PhalanxError where that is none of this host's."""
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError as error:
        raise _not_ours(address, str(error)) from error


def network_environ(address: str) -> Mapping[str, str]:
    """The variables by which gloo and NCCL (its bootstrap, and its data where there is no RDMA) use the interface that
    carries `address`; none for a loopback address. Raises PhalanxError where no interface carries it.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise _not_ours(address, str(error)) from error
    if all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found):
        return {}
    names = [name for name, each in linux.interface_addresses() if each in found]
    if not names:
        raise _not_ours(address, "no interface carries it")
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}"}


def _not_ours(address: str, why: str) -> PhalanxError:
    return PhalanxError(
        "address of this host for its ranks",
        value=address,
        expected="an address that one of its interfaces carries",
        remedy=f"name one that the other hosts can reach ({why})",
    )
