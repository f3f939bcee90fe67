"""The cluster as traffic sees it: fast domains of GPUs, joined by a network.

A group of ranks lies in the layout with a stride: tp varies fastest, then cp, then dp, and pp slowest (the order of
Megatron-LM), so tp meets the fast domain and pp crosses nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import PhalanxError
from phalanx.planner.collectives import Group, Link
from phalanx.planner.gpus import Gpu, find_gpu

Topology = Literal["fat-tree", "rail-optimised", "dragonfly", "torus"]
TOPOLOGIES: tuple[Topology, ...] = ("fat-tree", "rail-optimised", "dragonfly", "torus")

# Seconds: NVLink and the network for a small message (DeepSeek-V3 hardware paper, arXiv 2505.09343, table 5: 3.3 us,
# InfiniBand 2.8 us in a leaf and 0.9 us more for each further tier), and what a collective's step costs beside.
_FAST_LATENCY_S, _NETWORK_LATENCY_S, _TIER_LATENCY_S = 3.3e-6, 5.0e-6, 0.9e-6
_NODES_PER_LEAF = 32
# 10^9 bytes a second and GPU, one way, of the makers' own systems (DGX A100, H100, B200, B300, GB200; Frontier).
_USUAL_NETWORK_GBPS = {"A100": 25.0, "H100": 50.0, "H200": 50.0, "H800": 50.0, "B300": 100.0, "MI250X": 12.5}
_USUAL_NETWORK_DEFAULT_GBPS = 50.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a job runs.

    network_gbps: of one GPU to other nodes, one way, 10^9 bytes a second. oversubscription: by how much the network
    narrows for traffic that leaves a pod of `nodes_per_pod` nodes; a dragonfly's groups are its pods. In a torus a
    message passes half a dimension on average, and a ring of neighbours none.
    """

    gpu: Gpu
    gpus_per_node: int = 8
    nvlink_domain: int = 8
    network_gbps: float = _USUAL_NETWORK_DEFAULT_GBPS
    topology: Topology = "fat-tree"
    oversubscription: float = 1.0
    nodes_per_pod: int = 0

    def group(self, ranks: int, stride: int, nvlink_share: float = 1.0, network_share: float = 1.0) -> Group:
        """The group of `ranks` ranks that are `stride` apart."""
        inner = max(1, min(ranks, self.nvlink_domain // max(stride, 1)))
        nodes = math.ceil(ranks / inner)
        spanned = math.ceil(ranks * stride / self.gpus_per_node)
        narrowed = self.oversubscription if self.nodes_per_pod and spanned > self.nodes_per_pod else 1.0
        return Group(
            ranks=ranks,
            inner=inner,
            fast=Link(_FAST_LATENCY_S, self.gpu.nvlink_gbps * 1e9 * nvlink_share),
            slow=Link(self._latency_s(nodes), self.network_gbps * 1e9 * network_share / narrowed),
        )

    def _latency_s(self, nodes: int) -> float:
        """Of one step between neighbouring nodes of a ring."""
        if self.topology == "torus" or nodes <= 1:
            return _NETWORK_LATENCY_S
        if self.topology == "dragonfly":
            return _NETWORK_LATENCY_S + 2 * _TIER_LATENCY_S
        # A rail's leaf joins one GPU of each node, so it reaches as many nodes as a fat-tree's leaf has ports.
        tiers = math.ceil(math.log(max(nodes, 2), _NODES_PER_LEAF))
        return _NETWORK_LATENCY_S + (tiers - 1) * _TIER_LATENCY_S


def cluster(
    gpu: str | Gpu,
    *,
    gpus_per_node: int | None = None,
    nvlink_domain: int | None = None,
    network_gbps: float | None = None,
    topology: str = "fat-tree",
    oversubscription: float = 1.0,
    nodes_per_pod: int = 0,
) -> Cluster:
    """A cluster of one kind of GPU; what is not given is as in its maker's own systems.

    Raises PhalanxError for an unknown kind or topology, and for counts and rates that are not above 0.
    """
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if topology not in TOPOLOGIES:
        remedy = "choose one of them"
        raise PhalanxError(
            "cluster.topology", value=topology, expected=f"one of {', '.join(TOPOLOGIES)}", remedy=remedy
        )
    rate = network_gbps if network_gbps is not None else usual_network_gbps(kind)
    per_node = gpus_per_node or (4 if kind.nvlink_domain > 8 else 8)
    if min(per_node, rate, oversubscription) <= 0:
        raise PhalanxError(
            "cluster",
            value=(per_node, rate, oversubscription),
            expected="counts and rates above 0",
            remedy="correct it",
        )
    domain = nvlink_domain or max(kind.nvlink_domain if kind.nvlink_domain > 8 else per_node, 1)
    return Cluster(kind, per_node, domain, rate, topology, oversubscription, nodes_per_pod)


def usual_network_gbps(gpu: Gpu) -> float:
    """One GPU's share of a node's network in the makers' own systems, one way, 10^9 bytes a second."""
    return _USUAL_NETWORK_GBPS.get(gpu.name.split("-")[0], _USUAL_NETWORK_DEFAULT_GBPS)
