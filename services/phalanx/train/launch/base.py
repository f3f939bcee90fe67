"""What train knows of nodes, and the one interface by which it acts on them.

`agents` speaks to agents that are there. A launcher for Slurm or Kubernetes starts agents for a job first, and is an
`agents` launcher from then on: what differs is which nodes there are, not how ranks are started.

Everything is by order id, and an id means one order for ever: to ask again is to ask for the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Assignment, Cause
from phalanx.snapshot.replicas import Kept
from phalanx.train.decide import ShareEnd
from phalanx.train.states import Preparation


class GangState(StrEnum):
    """What became of a gang on a node."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GangKey:
    """Which gang. job: `projects/<p>/jobs/<uid>`."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class HeldGang:
    """The part of a gang that a node holds."""

    key: GangKey
    ranks: tuple[int, ...]
    state: GangState


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node."""

    name: str
    uuid: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node has. num_slots: ranks that may run there at once. replica_address: host:port where it takes shares of
    steps into its memory, "" where it takes none; replica_bytes: how much of it.
    """

    host: str
    address: str
    num_slots: int
    num_cpus: int = 0
    memory_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    nvlink_domain: str = ""
    rail: str = ""
    leaf_switch: str = ""
    replica_address: str = ""
    replica_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is known. instance_id: the process of its agent. silent_s: since it was last heard. is_ending: that
    process was told to end, and begins nothing more.
    """

    node_id: str
    instance_id: str
    inventory: Inventory
    is_connected: bool
    silent_s: float
    gangs: tuple[HeldGang, ...] = ()
    num_dropped_records: int = 0
    is_ending: bool = False

    def holds(self, key: GangKey) -> bool:
        """Whether ranks of that attempt live there, or their end is still to be told."""
        return any(gang.key == key for gang in self.gangs)


@dataclass(frozen=True, slots=True)
class To:
    """Whom an order is for: one process of a node's agent."""

    node_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Check:
    """Check a job. origin: of a forked job, as the contract's ForkOrigin."""

    job: str
    spec: Mapping[str, Any] = field(repr=False)
    world_size: int
    origin: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Holder:
    """An agent that keeps shares of a step in memory. address: host:port. ranks: whose shares."""

    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartGang:
    """Start the ranks of an attempt on a node. partner: host:port of the agent that keeps their shares too. holders:
    who else keeps shares of the parent.
    """

    key: GangKey
    assignment: Assignment
    world_size: int
    arguments: Mapping[str, Any] = field(repr=False)
    rendezvous: str
    parent: CheckpointRef | None
    token: str = field(repr=False)
    code_digest: str = ""
    partner: str = ""
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks live. rendezvous: host:port where they meet."""

    rendezvous: str


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a rank's log. complete: the rank has ended, and this reaches the end."""

    data: bytes
    offset: int
    complete: bool


class Launcher(Protocol):
    """Acts on nodes. `check` and `start_gang` return None until the answer is there; a Cause where it was refused, or
    where that process of the agent is gone. No method but the last four waits.
    """

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are known, by name."""

    def check(self, to: To, order: str, check: Check) -> Preparation | Cause | None:
        """Has a job checked."""

    def start_gang(self, to: To, order: str, start: StartGang) -> Started | Cause | None:
        """Starts ranks."""

    def started(self, order: str) -> Started | Cause | None:
        """The answer to a start, without asking for one."""

    def was_sent(self, order: str) -> bool:
        """Whether this process has sent the order."""

    def end_gang(self, to: To, order: str, key: GangKey, grace_s: float, why: str, *, superseded: bool) -> None:
        """Ends ranks."""

    def give_orders(self, to: To, order: str, key: GangKey, *, stop: bool, checkpoint: bool) -> None:
        """Passes an order to the ranks."""

    def release(self, job: str) -> None:
        """Lets a job go on every node."""

    def ends(self, key: GangKey) -> Mapping[str, ShareEnd]:
        """How the attempt's ranks ended, by node, as far as it is known."""

    def settle(self, key: GangKey) -> None:
        """What the ends of the attempt led to is recorded: they need not be told again."""

    def settle_start(self, key: GangKey) -> None:
        """It is recorded that the attempt runs: what its ranks said before need not be told again."""

    def stacks(self, to: To, key: GangKey, ranks: Collection[int], deadline_s: float) -> Mapping[int, str]:
        """The Python stacks of ranks. Raises PhalanxError and OutsideError."""

    def read_log(self, to: To, key: GangKey, rank: int, offset: int, max_bytes: int, deadline_s: float) -> LogChunk:
        """A piece of a rank's log. Raises PhalanxError and OutsideError."""

    def kept_shares(self, to: To, job: str, deadline_s: float) -> tuple[Kept, ...]:
        """The shares of a job's steps in a node's memory. Raises PhalanxError and OutsideError."""

    def store_shares(self, to: To, key: GangKey, step: int, deadline_s: float, *, commit: bool) -> None:
        """Has a node create in storage what it keeps of a step, or commit it. Raises PhalanxError and OutsideError."""
