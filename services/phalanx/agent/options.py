"""The agent's own settings, `[options]` of its configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.gang.order import LOOPBACK


@dataclass(frozen=True, slots=True)
class Options:
    """state_dir: folder for the node's name and the logs of ranks. node: the node's name; empty: made once, kept there.

    slots: ranks that may run here at once; 0: one a GPU, or one a CPU where there is no GPU. address: under which ranks
    of other nodes reach this one; a loopback address serves a cluster of one node. nvlink_domain, rail, leaf_switch:
    where the node stands in the network; empty where unknown. socket: path of the Unix socket for ranks; empty: in
    `state_dir`. stop_grace_s: for ranks to commit when the agent is told to end, where that is shorter than
    the job's own grace; 0: always that. replica_fraction: of main memory, the most that is taken to keep steps of
    jobs for other nodes and its own; 0: none, and other nodes have nothing to call here. max_log_bytes: that the logs
    of ranks may take when a gang starts (those of the attempts that ended first are removed); 0: without bound.
    """

    state_dir: Path
    node: str = ""
    slots: int = 0
    address: str = LOOPBACK
    nvlink_domain: str = ""
    rail: str = ""
    leaf_switch: str = ""
    socket: str = ""
    stop_grace_s: float = 0.0
    heartbeat_s: float = 2.0
    max_waiting_records: int = 20_000
    prepare_deadline_s: float = 300.0
    replica_fraction: float = 0.25
    max_log_bytes: int = 10 << 30
