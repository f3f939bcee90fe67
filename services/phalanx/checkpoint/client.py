"""The checkpoint service, called: plain frozen values in and out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as pb
from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from phalanx.checkpoint import wire
from phalanx.checkpoint.catalog import State, View
from phalanx.checkpoint.collection import Removal, Report
from phalanx.checkpoint.retention import Decision
from phalanx.checkpoint.wire import Progress
from phalanx.lineage import CheckpointRef, Manifest
from phalanx.rpc import Channel, ClientConfig, Credentials, connect, connect_client
from phalanx.rpc.asking import asked
from phalanx.snapshot.draft_message import draft_message

__all__ = [
    "CheckpointClient",
    "Decision",
    "Listing",
    "Progress",
    "Removal",
    "Report",
    "State",
    "View",
    "connect_checkpoint",
]

SERVICE: Final = "checkpoint"
# Every method but the stream may be repeated: a gang's writes by what is in storage, an operator's by their request id.
IDEMPOTENT: Final = (
    "BeginCheckpoint",
    "CommitCheckpoint",
    "AbortCheckpoint",
    "ReportDamage",
    "ResolveCheckpoint",
    "ListCheckpoints",
    "PinCheckpoint",
    "UnpinCheckpoint",
    "DeleteCheckpoint",
    "PruneCheckpoints",
)
COMMIT_DEADLINE_S, LOOK_DEADLINE_S, PRUNE_DEADLINE_S, MARGIN_S = 600.0, 60.0, 3600.0, 10.0


@dataclass(frozen=True, slots=True)
class Listing:
    """A job's checkpoints, oldest first. revision: of its pins, for the next operator write."""

    checkpoints: tuple[View, ...]
    revision: int


class CheckpointClient:
    """One checkpoint service. Raises what `phalanx.rpc` raises: PhalanxErrors as the service raised them, Unavailable
    where it does not answer. A context manager closes the channel. job: `projects/<p>/jobs/<uid>`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._stub = channel, CheckpointServiceStub(channel)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> CheckpointClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, job: str, ref: CheckpointRef, world_size: int, *, timeout_s: float | None = None) -> None:
        """Announces a save; raises Superseded for an attempt that is not the newest."""
        request = asked(pb.BeginCheckpointRequest, job=job, ref=wire.to_ref(ref), world_size=world_size)
        self._stub.BeginCheckpoint(request, timeout=timeout_s)

    def commit(self, job: str, draft: Manifest, deadline_s: float = COMMIT_DEADLINE_S) -> View:
        """Returns when the checkpoint exists; raises Superseded, Unavailable where parts did not come in time."""
        allowed = Duration()
        allowed.FromNanoseconds(int(deadline_s * 1e9))
        request = asked(pb.CommitCheckpointRequest, job=job, draft=draft_message(draft), deadline=allowed)
        return wire.from_view(self._stub.CommitCheckpoint(request, timeout=deadline_s + MARGIN_S).checkpoint)

    def abort(self, job: str, ref: CheckpointRef, *, timeout_s: float | None = None) -> None:
        """Gives up a save; raises Superseded, FailedPrecondition where it is committed."""
        self._stub.AbortCheckpoint(asked(pb.AbortCheckpointRequest, job=job, ref=wire.to_ref(ref)), timeout=timeout_s)

    def report_damage(
        self, job: str, attempt: int, ref: CheckpointRef, why: str, *, timeout_s: float | None = None
    ) -> None:
        """Tells that the attempt can't restore the checkpoint; it is in the journal by then."""
        request = asked(pb.ReportDamageRequest, job=job, attempt=attempt, ref=wire.to_ref(ref), why=why)
        self._stub.ReportDamage(request, timeout=timeout_s)

    def resolve(self, job: str, selector: str = "latest") -> View:
        """The live checkpoint of `latest`, a step, or a<A>-s<step>; raises NotFound."""
        request = asked(pb.ResolveCheckpointRequest, job=job, selector=selector)
        return wire.from_view(self._stub.ResolveCheckpoint(request, timeout=LOOK_DEADLINE_S).checkpoint)

    def list(self, job: str, *, include_dead: bool = False, page_size: int = 0) -> Listing:
        """All checkpoints, by as many pages as it takes; the revision is the first page's."""
        views: list[View] = []
        revision, token = None, ""
        while True:
            request = asked(
                pb.ListCheckpointsRequest, job=job, include_dead=include_dead, page_size=page_size, page_token=token
            )
            page = self._stub.ListCheckpoints(request, timeout=LOOK_DEADLINE_S)
            views += map(wire.from_view, page.checkpoints)
            revision, token = page.revision if revision is None else revision, page.next_page_token
            if not token:
                return Listing(tuple(views), revision)

    def verify(self, job: str, selector: str = "latest", *, timeout_s: float | None = None) -> Iterator[Progress]:
        """Progress of a check, the findings with the last."""
        stream = self._stub.VerifyCheckpoint(
            asked(pb.VerifyCheckpointRequest, job=job, selector=selector), timeout=timeout_s
        )
        return map(wire.from_progress, stream)

    def pin(
        self, job: str, selector: str, reason: str, *, expected_revision: int = 0, request_id: str | None = None
    ) -> tuple[View, int]:
        """Keeps a checkpoint until it is unpinned; the revision of the job's pins."""
        request = asked(
            pb.PinCheckpointRequest,
            request_id=_id(request_id),
            job=job,
            selector=selector,
            reason=reason,
            expected_revision=expected_revision,
        )
        answer = self._stub.PinCheckpoint(request, timeout=LOOK_DEADLINE_S)
        return wire.from_view(answer.checkpoint), answer.revision

    def unpin(
        self, job: str, selector: str, *, expected_revision: int = 0, request_id: str | None = None
    ) -> tuple[View, int]:
        """Takes a pin back."""
        request = asked(
            pb.UnpinCheckpointRequest,
            request_id=_id(request_id),
            job=job,
            selector=selector,
            expected_revision=expected_revision,
        )
        answer = self._stub.UnpinCheckpoint(request, timeout=LOOK_DEADLINE_S)
        return wire.from_view(answer.checkpoint), answer.revision

    def delete(
        self, job: str, selector: str, *, expected_revision: int = 0, request_id: str | None = None
    ) -> tuple[int, int]:
        """Removes one checkpoint at once; objects and bytes that went."""
        request = asked(
            pb.DeleteCheckpointRequest,
            request_id=_id(request_id),
            job=job,
            selector=selector,
            expected_revision=expected_revision,
        )
        answer = self._stub.DeleteCheckpoint(request, timeout=PRUNE_DEADLINE_S)
        return answer.num_objects, answer.num_bytes

    def prune(self, job: str, *, dry_run: bool = False, request_id: str | None = None) -> Report:
        """Applies retention and collects garbage now, or says what would go and why."""
        request = asked(pb.PruneCheckpointsRequest, request_id=_id(request_id), job=job, dry_run=dry_run)
        return wire.from_report(self._stub.PruneCheckpoints(request, timeout=PRUNE_DEADLINE_S))


def connect_checkpoint(
    to: ClientConfig | str, credentials: Credentials | None = None, **settings: Any
) -> CheckpointClient:
    """A client by a context, or by host:port and credentials of one's own (an agent on behalf of a gang)."""
    if isinstance(to, ClientConfig):
        return CheckpointClient(connect_client(to, SERVICE, idempotent=IDEMPOTENT, **settings))
    assert credentials is not None, "an address needs credentials"
    return CheckpointClient(connect(SERVICE, to, credentials, idempotent=IDEMPOTENT, **settings))


def _id(request_id: str | None) -> str:
    return request_id or uuid.uuid4().hex
