"""`[cluster.network]` on this host: looked at, and put into the environment from which NCCL reads it when its first
communicator opens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.gang import linux
from phalanx.spec.network import Network, disagreements, variables_of

ADAPTERS_FOLDER = Path("/sys/class/infiniband")
LOG = logging.getLogger(__name__)


def enter_network(
    network: Network,
    *,
    environ: MutableMapping[str, str] = os.environ,
    adapters_folder: Path = ADAPTERS_FOLDER,
    interfaces: Iterable[str] | None = None,
) -> None:
    """Sets the variables of `network` in `environ`; what they overrule is logged. interfaces: names of those of this
    host that are up, None: those that it has now.

    Raises PhalanxError for an interface, adapter or file that this host lacks: NCCL would give no reason, or go on by
    slower ways.
    """
    adapters = sorted(each.name for each in adapters_folder.iterdir()) if adapters_folder.is_dir() else []
    names = sorted({name for name, _ in linux.interface_addresses()} if interfaces is None else set(interfaces))
    _require("interfaces", network.interfaces, names, "network interfaces that are up")
    _require("ib_hca", network.ib_hca, adapters, "RDMA adapters")
    if (network.transport or "").lower() == "ib" and not adapters:
        raise PhalanxError(
            "cluster.network.transport",
            value=network.transport,
            expected=f"RDMA adapters on this host, and {adapters_folder} shows none",
            remedy='load the driver of the adapters, or remove the key, or set it to "Socket"',
        )
    if network.topology_file is not None and not os.access(network.topology_file, os.R_OK):
        raise PhalanxError(
            "cluster.network.topology_file",
            value=network.topology_file,
            expected="a file that can be read on every node",
            remedy="put it there, or remove the key",
        )
    for sentence in disagreements(network, environ):
        LOG.warning("%s", sentence)
    environ.update(variables_of(network))


def selected(chosen: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that NCCL takes by a list as of NCCL_SOCKET_IFNAME or NCCL_IB_HCA: names that begin with one of
    its entries, with `=` before the first those that are one, with `^` all others. Ports are passed over.
    """
    is_excluding, rest = chosen.startswith("^"), chosen.removeprefix("^")
    is_exact, rest = rest.startswith("="), rest.removeprefix("=")
    entries = [entry.partition(":")[0] for entry in rest.split(",")]

    def matches(name: str) -> bool:
        return name in entries if is_exact else any(name.startswith(entry) for entry in entries)

    return [name for name in names if matches(name) != is_excluding]


def _require(key: str, chosen: str | None, names: Sequence[str], what: str) -> None:
    if chosen is not None and not selected(chosen, names):
        raise PhalanxError(
            f"cluster.network.{key}",
            value=chosen,
            expected=f"one of the {what} on this host ({', '.join(names) or 'there are none'})",
            remedy="correct it, or remove the key",
        )
