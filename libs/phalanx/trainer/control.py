"""`Control`: the one interface between a rank's loop and whoever keeps the run alive.

Alone (`phalanx run`, torchrun) `StorageControl` serves it from object storage; beside an agent the same calls go
through the agent's socket. The loop asks for a plan up to a horizon, never reads past it, obeys orders at step
boundaries only, and hands over what must be committed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from phalanx.core.errors import PhalanxError
from phalanx.lineage import Manifest
from phalanx.lineage.plan import LostWindows, MixtureChange, ReadingPlan, Spans


class Superseded(PhalanxError):
    """A newer attempt of the job has been opened: this one ends, and nobody starts it again."""


class Orders(enum.IntFlag):
    """What the next step boundary must do; all ranks obey the union of what any rank was told."""

    NONE = 0
    STOP = 1
    CHECKPOINT = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What may be read: no window of a step after `horizon_step`, until renewed.

    zero_weight: half-open ranges of window positions that keep their places but carry no loss (skipped or damaged).
    lost: the same by source of a mixture, of the windows of its own stream. mixture: changes of its weights.
    """

    horizon_step: int
    zero_weight: Spans
    journal_digest: str
    mixture: tuple[MixtureChange, ...] = ()
    lost: LostWindows = ()

    @staticmethod
    def of(plan: ReadingPlan) -> Plan:
        """What the journal says, as the loop knows it."""
        return Plan(plan.horizon_step, plan.zero_weight, plan.journal_digest, plan.mixture, plan.lost)

    def reads_as(self, other: Plan) -> bool:
        """Whether both say the same of every position."""
        return (self.zero_weight, self.mixture, self.lost) == (other.zero_weight, other.mixture, other.lost)

    def to_json(self) -> dict[str, Any]:
        """As rank 0 tells it to the others."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Plan:
        return Plan(
            horizon_step=int(fields["horizon_step"]),
            zero_weight=_spans(fields["zero_weight"]),
            journal_digest=str(fields["journal_digest"]),
            mixture=tuple(
                MixtureChange(
                    int(each["position"]), tuple((str(name), str(weight)) for name, weight in each["weights"])
                )
                for each in fields["mixture"]
            ),
            lost=tuple((str(source), _spans(spans)) for source, spans in fields["lost"]),
        )


def _spans(pairs: Iterable[Sequence[int]]) -> Spans:
    return tuple((int(start), int(stop)) for start, stop in pairs)


@dataclass(frozen=True, slots=True)
class Opening:
    """How an attempt starts: its number, the checkpoint it continues from (None: from step 0) and its first plan."""

    attempt: int
    parent: Manifest | None
    plan: Plan


class Commit(Protocol):
    """A checkpoint on its way; `wait` returns when it exists and raises when it never will."""

    @property
    def done(self) -> bool: ...

    def wait(self, deadline_s: float) -> None: ...


class Control(Protocol):
    """What the loop needs from outside; each call has a deadline and is made by every rank in the same order."""

    def open(self) -> Opening:
        """Opens the attempt (once a gang) and returns the same opening on every rank."""
        ...

    def renew(self, step: int) -> Plan:
        """The plan that holds from `step` on, with a horizon beyond it. Raises Superseded (on rank 0) when a newer
        attempt of the job has been opened.
        """
        ...

    def refuse_parent(self, parent: Manifest, why: str) -> None:
        """This rank can't restore `parent`: the attempt will end, and no later one may start from it."""
        ...

    def report_shard(self, key: str, why: str, step: int) -> bool:
        """This rank can't read the object `key` of the training split for `step`; what is decided then counts from the
        next attempt on. True: the object is whole, so it may be read once more now.
        """
        ...

    def roll_back(self, first_step: int, last_step: int) -> bool:
        """The steps from first_step to last_step, both included, gave nothing finite. True: it is written down that the
        next attempt begins before them and leaves their windows out, and this one is to end; False: others decide.
        """
        ...

    def orders(self) -> Orders:
        """Orders that reached this rank since the last call; never blocks."""
        ...

    def commit(self, manifest: Manifest) -> Commit:
        """Begins to commit the checkpoint that `manifest` drafts, once the parts of all ranks are stored."""
        ...

    def close(self) -> None:
        """Ends the connection; pending commits must have been waited for."""
        ...
