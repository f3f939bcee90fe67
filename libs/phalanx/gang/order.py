"""The values that describe a gang: what is ordered, what a rank is told, what comes back."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
RETURNED = "returned"  # what a rank reports last of all where its entry returned
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 of a gang listens for the others."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class GangOrder:
    """The ranks of one gang that are to start on this host.

    entry: "package.module:function", called in each rank with its RankContext. arguments: plain JSON values.
    environ: laid over the fork server's own. log_dir: gets `rank<r>.log` (stdout, stderr) and `rank<r>.stack`.
    attempt: goes into the rendezvous keys. import_deadline_s: for a rank to import its entry. debug_rank: gets the
    terminal that `ForkServer.start` is given.
    ranks: which of the world live here, ascending; None: all. rendezvous: None on the host of rank 0, which listens
    itself and tells where (`Gang.rendezvous`); the other hosts are started with that. address: under which this host's
    ranks reach and are reached; a loopback address where no other host takes part.
    """

    world_size: int
    entry: str
    log_dir: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    import_deadline_s: float = 120.0
    debug_rank: int | None = None
    ranks: tuple[int, ...] | None = None
    rendezvous: Rendezvous | None = None
    address: str = LOOPBACK

    def __post_init__(self) -> None:
        ranks = self.local_ranks
        assert ranks and ranks == tuple(sorted(set(ranks))), ranks
        assert ranks[0] >= 0 and ranks[-1] < self.world_size, ranks
        assert (0 in ranks) == (self.rendezvous is None), "rank 0 listens, the other hosts are told where"

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks that live on this host."""
        return tuple(range(self.world_size)) if self.ranks is None else self.ranks

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the world lives on this host."""
        return len(self.local_ranks) == self.world_size

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "log_dir": str(self.log_dir)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> GangOrder:
        ranks, rendezvous = fields["ranks"], fields["rendezvous"]
        typed = {
            "log_dir": Path(fields["log_dir"]),
            "ranks": None if ranks is None else tuple(ranks),
            "rendezvous": None if rendezvous is None else Rendezvous(**rendezvous),
        }
        return GangOrder(**{**fields, **typed})

    def log_path(self, rank: int) -> Path:
        return self.log_dir / f"rank{rank}.log"

    def stack_path(self, rank: int) -> Path:
        return self.log_dir / f"rank{rank}.stack"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank said, or that happened to it.

    rank: None for what concerns the gang. time_monotonic_s: the host's monotonic clock where it happened.
    Kinds that the gang itself gives meaning: `entry` (deadline_s: of its import), `phase` (name, step, deadline_s),
    `error`, `exit`, `stopped`, `committed`, `server_lost`.
    """

    rank: int | None
    kind: str
    fields: Mapping[str, Any]
    time_monotonic_s: float


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended. exit_code: None after a signal. sent_by_us: the gang itself had sent that signal.

    oom_kills: how often the cgroup's out-of-memory killer struck while the gang ran.
    """

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    sent_by_us: bool
    oom_kills: int
    time_monotonic_s: float

    @staticmethod
    def from_event(event: Event) -> RankExit:
        assert event.kind == "exit" and event.rank is not None
        return RankExit(rank=event.rank, time_monotonic_s=event.time_monotonic_s, **event.fields)
