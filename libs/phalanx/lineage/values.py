"""The values of a job's lineage: frozen, plain, and stored field by field as they stand here (docs/formats/lineage.md).

Steps count global batches: step k is the k-th batch (from 1), and a checkpoint at step k is the state after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import Field

Count = Annotated[int, Field(ge=0)]
Ordinal = Annotated[int, Field(ge=1)]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|xxh3:[0-9a-f]{32})$")]


@dataclass(frozen=True, slots=True, order=True)
class CheckpointRef:
    """Names a checkpoint: the attempt that wrote it and the step after which it was taken."""

    attempt: Ordinal
    step: Count

    def __str__(self) -> str:
        return f"attempt {self.attempt} step {self.step}"


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Another object by its key below the job's root, its size and its digest: whoever reads it can tell that it is the
    one meant.
    """

    key: str
    num_bytes: Count
    digest: Digest


@dataclass(frozen=True, slots=True)
class RecordsName:
    """What the key of a records object says: who wrote it and which steps (both included) it covers."""

    attempt: Ordinal
    rank: Count
    first_step: Ordinal
    last_step: Ordinal


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the job.

    parent: the checkpoint it starts from, None for the beginning.
    journal: for each ancestor attempt, oldest first, (number, entries): its journal entries 1 .. entries hold.
    journal_digest: of all these entries (`journal.journal_digest`).
    placement: the layout and where its ranks run, as the caller describes it.
    request_id: fresh for each opening, so that an opener knows its own object after a lost reply.
    """

    number: Ordinal
    parent: CheckpointRef | None
    journal: tuple[tuple[Ordinal, Count], ...]
    journal_digest: Digest
    code_digest: Digest
    identity_digest: Digest
    placement: Mapping[str, Any]
    request_id: str

    @property
    def start_step(self) -> int:
        """The step that the attempt starts from: its parent's, or 0."""
        return self.parent.step if self.parent else 0


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A change of the order during the run.

    position: the window from which it holds. kind, payload: what changes, in the caller's words.
    request_id: names the request, so that one written twice counts once.
    """

    attempt: Ordinal
    number: Ordinal
    kind: str
    position: Count
    payload: Mapping[str, Any]
    request_id: str


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where the loader stands: global batches done, and the first window position that is not yet read."""

    step: Count
    position: Count


@dataclass(frozen=True, slots=True)
class Manifest:
    """Root of a checkpoint. The checkpoint exists from the moment in which this object does.

    schedule: scalars of the schedules (tokens seen, loss scale, ...). world_size: ranks that saved it, one part each.
    records: every records object of the attempt up to `step` that no earlier manifest of the attempt names.
    parts: the part objects, by rank. speculative: taken between the regular ones, of its own quota. metrics: what was
    measured of the state at `step`, finite numbers by name.
    part_lists, record_lists: in a root that would name too many, objects that list them instead, in order (`lists`);
    directory: the object by which a reader finds the parts that it needs. Fields from `speculative` on are not stored
    where they say nothing.
    """

    attempt: Ordinal
    step: Count
    world_size: Ordinal
    identity_digest: Digest
    placement_digest: Digest
    code_digest: Digest
    journal_digest: Digest
    loader: LoaderState
    schedule: Mapping[str, int | float]
    records: tuple[ObjectRef, ...]
    parts: tuple[ObjectRef, ...]
    speculative: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    part_lists: tuple[ObjectRef, ...] = ()
    record_lists: tuple[ObjectRef, ...] = ()
    directory: ObjectRef | None = None

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint's name."""
        return CheckpointRef(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class ForkedMixture:
    """How far the sources of a fork had been read, where it or its origin reads several.

    start: the window position up to which `windows` (by source of the fork) were read; weights: those that the origin
    went on with from there, as text, where the fork's job file changes nothing of the mixture: then the fork's own
    reading is the origin's. Empty where the fork's own weights begin, at the origin's position.
    """

    start: Count
    windows: Mapping[str, Count]
    weights: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The checkpoint of another job from which a job begins. position: where that one's loader stood. Steps and
    positions before it are the other job's. mixture: None where both read one split, whose windows are the positions.
    """

    project: str
    uid: str
    attempt: Ordinal
    step: Count
    position: Count
    mixture: ForkedMixture | None = None

    def plain(self) -> dict[str, Any]:
        """As it is stored: without `mixture` where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "mixture" or value is not None}

    def __str__(self) -> str:
        return f"attempt {self.attempt} step {self.step} of projects/{self.project}/jobs/{self.uid}"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The job as it was first created: request id, resolved spec, identity (as dict, to name what differs) and its
    digest. origin: None for a job that begins from nothing (then it is not stored).
    """

    request_id: str
    spec: Mapping[str, Any]
    identity: Mapping[str, Any]
    identity_digest: Digest
    origin: ForkPoint | None = None
