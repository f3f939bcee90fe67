"""Which port each process listens on: counted from a base, or free ones that are kept from then on."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.home.layout import AGENT, SERVICES
from phalanx.rpc.config import split_address
from phalanx.rpc.sockets import refuse_taken

DEFAULT_PORT_BASE = 7700
_METRICS_OFFSET = 10
FREE_PORTS = range(15_000, 32_000)


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port by process. page: of the monitor's page."""

    services: Mapping[str, str]
    metrics: Mapping[str, str]
    page: str

    @property
    def page_url(self) -> str:
        """What a browser opens."""
        return f"http://{self.page}/"


def counted(host: str, base: int, page_host: str) -> Addresses:
    """The page at `base`, services behind it, metrics ten further on."""
    if not 1 <= base <= 65535 - _METRICS_OFFSET - len(SERVICES) - 1:
        raise PhalanxError(
            "--port-base",
            value=base,
            expected="a port from 1 to 65500, or 0 for free ones",
            remedy="choose another one",
        )
    services = {name: f"{host}:{base + 1 + index}" for index, name in enumerate(SERVICES)}
    names = (*SERVICES, AGENT)
    metrics = {name: f"{host}:{base + 1 + _METRICS_OFFSET + index}" for index, name in enumerate(names)}
    return Addresses(services, metrics, f"{page_host}:{base}")


def free(host: str, page_host: str = "") -> Addresses:
    """Ports that nobody listens on now, below those that systems hand out for outgoing connections: one of those may be
    taken again before the process that it was found for listens on it.
    """
    names = (*SERVICES, AGENT)
    ports = iter(random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)))
    with ExitStack() as stack:

        def take(host: str = host) -> str:
            for port in ports:
                probe = stack.enter_context(socket.socket())
                try:
                    probe.bind((host, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise _no_address(host, error) from error
                    continue
                return f"{host}:{port}"
            raise OutsideError(f"no port of {host} from {FREE_PORTS.start} to {FREE_PORTS.stop} is free")

        return Addresses({name: take() for name in SERVICES}, {name: take() for name in names}, take(page_host or host))


def refuse_taken_ports(addresses: Addresses, names: Collection[str]) -> None:
    """Raises PhalanxError, which names the process, when one of those cannot listen where it is to. A process that
    listens there might answer for it.
    """
    for name in names:
        if name in addresses.services:
            refuse_taken(*split_address(addresses.services[name], name), name)
        refuse_taken(*split_address(addresses.metrics[name], name), f"the metrics of {name}")
    refuse_taken(*split_address(addresses.page, "page"), "the monitor's page")


def _no_address(host: str, error: OSError) -> PhalanxError:
    return PhalanxError(
        "--host", value=host, expected=f"an address of this machine ({error.strerror})", remedy="correct the address"
    )
