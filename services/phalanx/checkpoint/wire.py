"""Between the values of this service and the messages of its contract. Whole both ways: what is read was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC

from google.protobuf.timestamp_pb2 import Timestamp

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as pb
from phalanx.checkpoint.catalog import State, View
from phalanx.checkpoint.collection import Removal, Report
from phalanx.checkpoint.names import checkpoint_name
from phalanx.checkpoint.retention import Decision
from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import LARGEST
from phalanx.lineage import CheckpointRef, Manifest
from phalanx.lineage.registry import JobName
from phalanx.snapshot.draft_message import draft_of
from phalanx.snapshot.verify import Damage

STATES = {
    State.LIVE: pb.CHECKPOINT_STATE_LIVE,
    State.DEAD: pb.CHECKPOINT_STATE_DEAD,
    State.DAMAGED: pb.CHECKPOINT_STATE_DAMAGED,
    State.OPEN: pb.CHECKPOINT_STATE_OPEN,
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a check is; findings: None before its end."""

    ref: CheckpointRef
    done_bytes: int
    total_bytes: int
    findings: tuple[Damage, ...] | None = None


def to_ref(ref: CheckpointRef) -> pb.CheckpointRef:
    """As a message."""
    return pb.CheckpointRef(attempt=ref.attempt, step=ref.step)


def from_ref(message: pb.CheckpointRef) -> CheckpointRef:
    """From a message of a caller; raises PhalanxError for numbers that no checkpoint has."""
    if not (1 <= message.attempt <= LARGEST and 0 <= message.step <= LARGEST):
        raise PhalanxError(
            "ref",
            value=f"attempt {message.attempt} step {message.step}",
            expected=f"an attempt from 1 and a step from 0, up to {LARGEST}",
            remedy="name the checkpoint that was written",
        )
    return CheckpointRef(message.attempt, message.step)


def from_draft(message: pb.ManifestDraft) -> Manifest:
    """The draft of a manifest; its parts and records come from storage."""
    from_ref(message.ref)
    if not 1 <= message.world_size <= LARGEST:
        raise PhalanxError(
            "draft.world_size", value=message.world_size, expected="at least 1 rank", remedy="name the world's size"
        )
    return draft_of(message)


def to_view(job: JobName, view: View) -> pb.Checkpoint:
    """As a message."""
    message = pb.Checkpoint(
        name=checkpoint_name(job, view.ref),
        ref=to_ref(view.ref),
        state=STATES[view.state],
        pinned=view.pin_reason is not None,
        pin_reason=view.pin_reason or "",
        num_bytes=view.num_bytes,
        world_size=view.world_size,
    )
    if view.created is not None:
        created = Timestamp()
        created.FromDatetime(view.created)
        message.create_time.CopyFrom(created)
    return message


def from_view(message: pb.Checkpoint) -> View:
    """From a message of the service."""
    state = next(state for state, number in STATES.items() if number == message.state)
    return View(
        CheckpointRef(message.ref.attempt, message.ref.step),
        state,
        message.pin_reason if message.pinned else None,
        message.num_bytes,
        message.world_size,
        message.create_time.ToDatetime(UTC) if message.HasField("create_time") else None,
    )


def to_report(report: Report) -> pb.PruneCheckpointsResponse:
    """As a message."""
    return pb.PruneCheckpointsResponse(
        removals=[
            pb.Removal(
                ref=to_ref(each.ref),
                why=each.why,
                num_objects=each.num_objects,
                num_bytes=each.num_bytes,
                removed=each.removed,
            )
            for each in report.removals
        ],
        kept=[pb.Kept(ref=to_ref(each.ref), why=each.why) for each in report.kept],
    )


def from_report(message: pb.PruneCheckpointsResponse) -> Report:
    """From a message of the service."""
    return Report(
        tuple(
            Removal(_ref(each.ref), each.why, each.num_objects, each.num_bytes, each.removed)
            for each in message.removals
        ),
        tuple(Decision(_ref(each.ref), True, each.why) for each in message.kept),
    )


def to_progress(progress: Progress) -> pb.VerifyCheckpointResponse:
    """As a message."""
    return pb.VerifyCheckpointResponse(
        ref=to_ref(progress.ref),
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
        finished=progress.findings is not None,
        findings=_to_findings(progress.findings or ()),
    )


def from_progress(message: pb.VerifyCheckpointResponse) -> Progress:
    """From a message of the service."""
    findings = tuple(Damage(each.key, each.what, tuple(each.tensors)) for each in message.findings)
    ref = CheckpointRef(message.ref.attempt, message.ref.step)
    return Progress(ref, message.done_bytes, message.total_bytes, findings if message.finished else None)


def _to_findings(damages: Sequence[Damage]) -> list[pb.Finding]:
    return [pb.Finding(key=each.key, what=each.what, tensors=each.tensors) for each in damages]


def _ref(message: pb.CheckpointRef) -> CheckpointRef:
    return CheckpointRef(message.attempt, message.step)
