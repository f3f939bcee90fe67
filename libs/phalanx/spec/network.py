"""`[cluster.network]`: what NCCL is told of the network (InfiniBand, RoCE, TCP), as keys that are checked, and the
environment variables that they stand for.

The meaning of each variable is that of NVIDIA's NCCL user guide, chapter "Environment Variables"
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). A key that is left out sets nothing: then what the
environment says counts, and where it says nothing, NCCL chooses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pydantic import field_validator

from phalanx.spec.keys import Mark, Section, key, wrong

_LIST = r"^\^?=?{entry}(,{entry})*$"
INTERFACES_PATTERN = _LIST.format(entry=r"[\w.-]{1,15}")
ADAPTERS_PATTERN = _LIST.format(entry=r"[\w.-]{1,63}(:\d*(:\d+(:\d+)?)?)?")


class Network(Section):
    """What NCCL is told of the network, the same on every node: each key sets one of its variables in every rank,
    before it opens. With `cluster.device = "cuda"` only."""

    interfaces: str | None = key(
        Mark.FREE,
        "IP interfaces for NCCL's bootstrap, and for its data where there is no RDMA: prefixes of names separated by "
        "commas; `=` before the first makes them whole names, `^` excludes them (NCCL_SOCKET_IFNAME).",
        None,
        pattern=INTERFACES_PATTERN,
    )
    transport: str | None = key(
        Mark.FREE,
        "Network that NCCL must use, rather than fall back on another: `IB` (InfiniBand and RoCE), `Socket`, or the "
        "name of a plugin (NCCL_NET).",
        None,
        shown="NCCL's choice",
        pattern=r"^[A-Za-z][\w.-]*$",
    )
    ib_hca: str | None = key(
        Mark.FREE,
        "RDMA adapters to use, as `=mlx5_0:1,mlx5_1:1`: prefixes of names separated by commas, each with its port "
        "where only one is meant; `=` before the first makes them whole names, `^` excludes them (NCCL_IB_HCA).",
        None,
        shown="all",
        pattern=ADAPTERS_PATTERN,
    )
    ib_gid_index: int | None = key(
        Mark.FREE,
        "Index of the global identifier in an adapter's table, which on RoCE says version and address "
        "(NCCL_IB_GID_INDEX).",
        None,
        shown="NCCL's choice by the three keys below",
        ge=0,
        le=255,
    )
    ib_roce_version: Literal[1, 2] | None = key(
        Mark.FREE, "RoCE version of the global identifier (NCCL_IB_ROCE_VERSION_NUM).", None, shown="2"
    )
    ib_address_family: Literal["ipv4", "ipv6"] | None = key(
        Mark.FREE, "Address family of the global identifier (NCCL_IB_ADDR_FAMILY).", None, shown='"ipv4"'
    )
    ib_address_range: str | None = key(
        Mark.FREE, "Addresses that the global identifier may have, as `10.0.0.0/8` (NCCL_IB_ADDR_RANGE).", None
    )
    ib_traffic_class: int | None = key(
        Mark.FREE,
        "Traffic class of data: on RoCE 4 x DSCP, by which switches know lossless traffic (NCCL_IB_TC).",
        None,
        shown="0",
        ge=0,
        le=255,
    )
    ib_control_traffic_class: int | None = key(
        Mark.FREE,
        "Traffic class of the short messages that return credits (NCCL_IB_FIFO_TC).",
        None,
        shown="ib_traffic_class",
        ge=0,
        le=255,
    )
    ib_service_level: int | None = key(
        Mark.FREE, "InfiniBand service level (NCCL_IB_SL).", None, shown="0", ge=0, le=15
    )
    ib_partition_index: int | None = key(
        Mark.FREE,
        "Index of the partition key in the port's table (NCCL_IB_PKEY).",
        None,
        shown="0",
        ge=0,
        le=65535,
    )
    ib_timeout: int | None = key(
        Mark.FREE,
        "Exponent of the time after which a message counts as lost: 4.096 us x 2^ib_timeout (NCCL_IB_TIMEOUT).",
        None,
        shown="20",
        ge=1,
        le=31,
    )
    ib_retry_count: int | None = key(
        Mark.FREE,
        "How often a lost message is sent again before NCCL reports an error (NCCL_IB_RETRY_CNT).",
        None,
        shown="7",
        ge=0,
        le=7,
    )
    ib_queue_pairs: int | None = key(
        Mark.FREE,
        "Queue pairs of one connection; more spread it over the paths of a fabric (NCCL_IB_QPS_PER_CONNECTION).",
        None,
        shown="1",
        ge=1,
        le=128,
    )
    ib_adaptive_routing: bool | None = key(
        Mark.FREE,
        "Whether messages are sent so that switches may route each packet as they like (NCCL_IB_ADAPTIVE_ROUTING).",
        None,
        shown="true on InfiniBand, false on RoCE",
    )
    cross_nic: Literal[0, 1, 2] | None = key(
        Mark.FREE,
        "Whether a ring may change from one adapter to another between nodes: 0 never (each adapter has a switch of "
        "its own), 1 yes, 2 where it is faster (NCCL_CROSS_NIC).",
        None,
        shown="2",
    )
    gpu_direct_level: Literal["LOC", "PIX", "PXB", "PHB", "SYS"] | None = key(
        Mark.FREE,
        "How far apart GPU and adapter may be for GPU Direct RDMA: never, one PCI switch, several, one NUMA node, "
        "anywhere (NCCL_NET_GDR_LEVEL).",
        None,
        shown="NCCL's choice",
    )
    topology_file: str | None = key(
        Mark.FREE,
        "XML file with the topology of a node, at this absolute path on each (NCCL_TOPO_FILE).",
        None,
        pattern=r"^/.*[^/]$",
    )

    @field_validator("ib_address_range")
    @classmethod
    def _range_is_a_network(cls, value: str | None) -> str | None:
        try:
            _ = None if value is None else ipaddress.ip_network(value)
        except ValueError as error:
            raise wrong(f"addresses as 10.0.0.0/8 or fd00::/8 ({error})", "correct it") from None
        return value


VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "interfaces": "NCCL_SOCKET_IFNAME",
        "transport": "NCCL_NET",
        "ib_hca": "NCCL_IB_HCA",
        "ib_gid_index": "NCCL_IB_GID_INDEX",
        "ib_roce_version": "NCCL_IB_ROCE_VERSION_NUM",
        "ib_address_family": "NCCL_IB_ADDR_FAMILY",
        "ib_address_range": "NCCL_IB_ADDR_RANGE",
        "ib_traffic_class": "NCCL_IB_TC",
        "ib_control_traffic_class": "NCCL_IB_FIFO_TC",
        "ib_service_level": "NCCL_IB_SL",
        "ib_partition_index": "NCCL_IB_PKEY",
        "ib_timeout": "NCCL_IB_TIMEOUT",
        "ib_retry_count": "NCCL_IB_RETRY_CNT",
        "ib_queue_pairs": "NCCL_IB_QPS_PER_CONNECTION",
        "ib_adaptive_routing": "NCCL_IB_ADAPTIVE_ROUTING",
        "cross_nic": "NCCL_CROSS_NIC",
        "gpu_direct_level": "NCCL_NET_GDR_LEVEL",
        "topology_file": "NCCL_TOPO_FILE",
    }
)
_FAMILIES = {"ipv4": "AF_INET", "ipv6": "AF_INET6"}
# What NCCL reads only while no index is given.
CHOOSES_INDEX = ("ib_roce_version", "ib_address_family", "ib_address_range")


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable of NCCL as ranks have it. key: of the job file that set it; empty where the environment did."""

    variable: str
    value: str
    key: str = ""


def variables_of(network: Network) -> dict[str, str]:
    """The variables that the keys set, by name; none for a key that is left out."""
    stated = {name: getattr(network, name) for name in VARIABLES}
    return {VARIABLES[name]: _text(value) for name, value in stated.items() if value is not None}


def settings_of(network: Network, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Every variable of NCCL in ranks that inherit `environ`, by name; keys of the job file stand above it."""
    keys = {variable: f"cluster.network.{name}" for name, variable in VARIABLES.items()}
    stated = [Setting(name, value, keys[name]) for name, value in variables_of(network).items()]
    known = {each.variable for each in stated}
    inherited = [
        Setting(name, value) for name, value in environ.items() if re.match("NCCL_", name) and name not in known
    ]
    return tuple(sorted([*stated, *inherited], key=lambda each: each.variable))


def disagreements(network: Network, environ: Mapping[str, str]) -> tuple[str, ...]:
    """One sentence for each key of the job file that `environ` contradicts."""
    return tuple(
        f"{each.variable} is {environ[each.variable]!r} in the environment, and {each.key} says {each.value!r}: the "
        "job file counts"
        for each in settings_of(network, environ)
        if each.key and environ.get(each.variable, each.value) != each.value
    )


def _text(value: str | int | bool) -> str:
    """As NCCL reads it."""
    if isinstance(value, bool):
        return str(int(value))
    return _FAMILIES.get(value, value) if isinstance(value, str) else str(value)
