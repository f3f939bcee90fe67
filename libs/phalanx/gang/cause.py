"""The first cause of a gang's end, decided purely from what its ranks reported and how they ended.

When one rank dies, its peers fail in their collectives, often earlier than the death is noticed. So what a rank died of
is weighed before it is timed: a cause of its own (an exception, a signal that the gang did not send) wins over SIGABRT,
which gloo also raises from a lost connection, and SIGABRT wins over an error that only says that a peer is gone. Among
equals the earliest wins; all times come from the monotonic clock of one host. Of several hosts each names its own first
cause, and times are never compared: the weight decides, then the order in which the causes were told.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from phalanx.gang.order import Event, RankExit

CauseKind = Literal[
    "process_death",
    "user_error",
    "error",
    "hang",
    "out_of_memory",
    "storage",
    "lost_peer",
    "interrupted",
    "superseded",
    "bad_shard",
]


class Weight(IntEnum):
    """How much an observation says about the cause; less is more."""

    OWN = 0
    ABORT = 1
    FOLLOW_UP = 2


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a gang ended.

    rank: None when it was no rank (the fork server, the user). detail: a traceback or a stack, many lines.
    is_waiting: a hang inside a collective, for which a rank of another host may be to blame.
    interrupted: the user stopped the gang before its ranks could end by themselves. superseded: a newer attempt exists.
    bad_shard: training data can't be read, and not because storage does not answer.
    """

    kind: CauseKind
    rank: int | None
    message: str
    where: str = ""
    detail: str = ""
    signal: int | None = None
    exit_code: int | None = None
    is_waiting: bool = False

    @property
    def weight(self) -> Weight:
        """How much it says about the end of a gang over several hosts."""
        if self.kind in ("lost_peer", "interrupted") or self.is_waiting:
            return Weight.FOLLOW_UP
        return Weight.ABORT if self.signal == signal.SIGABRT else Weight.OWN

    def __str__(self) -> str:
        who = "gang" if self.rank is None else f"rank {self.rank}"
        return f"{self.kind} of {who}: {self.message}" + (f" ({self.where})" if self.where else "")


_PEER_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_PEER_TEXT = re.compile(
    r"Connection closed by peer|Connection reset|Connection refused|Broken pipe|Timed out waiting|Socket Timeout"
    r"|Application timeout caused pair closure|connectFullMesh failed|Connect timeout|gloo/transport"
    r"|NCCL communicator was aborted|remote process exited|failed to recv|Socket closed"
)
# Errors that say by their class what it is.
_KINDS: Mapping[str, CauseKind] = {"Superseded": "superseded", "DamagedShard": "bad_shard"}
_MEMORY_ERRORS = {"MemoryError", "OutOfMemoryError"}
_MEMORY_TEXT = re.compile(r"can't allocate memory|not enough memory|CUDA out of memory")  # torch's on CPU has no type


def first_cause(
    events: Iterable[Event], exits: Iterable[RankExit], returned: Collection[int] | None = None
) -> Cause | None:
    """Why the gang ended, or None when nothing went wrong (every rank returned, or ended by a signal that the gang
    sent). returned: the ranks whose entry said so; None: exit code 0 says it.
    """
    errors = [event for event in events if event.kind == "error"]
    explained = {event.rank for event in errors}
    deaths = [
        death for death in exits if is_bad(death, returned) and not death.sent_by_us and death.rank not in explained
    ]
    weighed = [(*_weigh_error(event), event.time_monotonic_s) for event in errors]
    weighed += [(*_weigh_death(death), death.time_monotonic_s) for death in deaths]
    if not weighed:
        return None
    return min(weighed, key=lambda item: (item[0], item[2]))[1]


def is_bad(death: RankExit, returned: Collection[int] | None) -> bool:
    """Whether a rank ended otherwise than by returning: code that it runs may end its process with any exit code."""
    return death.exit_code != 0 or (returned is not None and death.rank not in returned)


def first_of_hosts(causes: Iterable[Cause | None]) -> Cause | None:
    """Why a gang over several hosts ended. causes: each host's own first cause (None: nothing went wrong there), in the
    order in which they were told.
    """
    return min((cause for cause in causes if cause is not None), key=lambda cause: cause.weight, default=None)


def is_follow_up(chain: Sequence[Sequence[Any]]) -> bool:
    """Whether an error, or one that it came from, only says that a peer is gone. chain: as `rank.describe` gives it."""
    return any(
        bool(_PEER_ERRORS.intersection(names)) or ("RuntimeError" in names and _PEER_TEXT.search(message) is not None)
        for names, message in chain
    )


def _weigh_error(event: Event) -> tuple[Weight, Cause]:
    fields = event.fields
    kind = _error_kind(fields)
    message = fields["message"] if fields.get("user_error") else f"{fields['type']}: {fields['message']}"
    weight = Weight.FOLLOW_UP if kind == "lost_peer" else Weight.OWN
    return weight, Cause(kind, event.rank, message, fields.get("where", ""), fields.get("traceback", ""))


def _error_kind(fields: Any) -> CauseKind:
    chain = fields.get("chain", [])
    if is_follow_up(chain):
        return "lost_peer"
    for kind in (_KINDS[name] for names, _ in chain for name in names if name in _KINDS):
        return kind
    if any(_MEMORY_ERRORS.intersection(names) or _MEMORY_TEXT.search(message) for names, message in chain):
        return "out_of_memory"
    if fields.get("user_error"):
        return "user_error"
    return "storage" if fields.get("outside") else "error"


def _weigh_death(death: RankExit) -> tuple[Weight, Cause]:
    if death.signal is None:
        message = f"exited with code {death.exit_code} without a word"
        return Weight.OWN, Cause("process_death", death.rank, message, exit_code=death.exit_code)
    name = signal.Signals(death.signal).name if death.signal in set(signal.Signals) else f"signal {death.signal}"
    if death.signal == signal.SIGKILL and death.oom_kills > 0:
        message = f"killed by {name}: the kernel ran out of memory"
        return Weight.OWN, Cause("out_of_memory", death.rank, message, signal=death.signal)
    weight = Weight.ABORT if death.signal == signal.SIGABRT else Weight.OWN
    return weight, Cause("process_death", death.rank, f"killed by {name}", signal=death.signal)
