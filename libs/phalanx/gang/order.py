"""The values that describe a gang: what is ordered, what a rank is told, what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GangOrder:
    """One gang to start on this host.

    entry: "package.module:function", called in each rank with its RankContext. arguments: plain JSON values.
    environ: laid over the fork server's own. log_dir: gets `rank<r>.log` (stdout, stderr) and `rank<r>.stack`.
    attempt: goes into the rendezvous keys. import_deadline_s: for a rank to import its entry. debug_rank: gets the
    terminal that `ForkServer.start` is given.
    """

    world_size: int
    entry: str
    log_dir: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    import_deadline_s: float = 120.0
    debug_rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "log_dir": str(self.log_dir)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> GangOrder:
        return GangOrder(**{**fields, "log_dir": Path(fields["log_dir"])})

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
