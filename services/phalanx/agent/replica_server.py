"""ReplicaService: shares of other nodes come in, and go out to whoever restores; translated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from phalanx.agent.replicas import PIECE_BYTES, ReplicaMemory, share_digest
from phalanx.api.agent.v1 import replica_service_pb2 as pb
from phalanx.api.agent.v1.replica_service_pb2_grpc import ReplicaServiceServicer
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.lineage.registry import JobName
from phalanx.rpc import AGENTS, Access, Denied, caller

_SERVICE = "/phalanx.api.agent.v1.ReplicaService"
ACCESS: Access = {f"{_SERVICE}/PutShare": AGENTS, f"{_SERVICE}/ReadShare": AGENTS}
MAX_OBJECTS = 100_000


class ReplicaServer(ReplicaServiceServicer):
    """Serves what this node keeps. memory_of: of a job; raises PhalanxError for one of which nothing is kept here."""

    def __init__(self, memory_of: Callable[[str], ReplicaMemory]) -> None:
        self._memory_of = memory_of

    def PutShare(  # noqa: N802
        self, request_iterator: Iterator[pb.PutShareRequest], context: grpc.ServicerContext
    ) -> pb.PutShareResponse:
        head = _head(request_iterator)
        ref, objects = _ref(head.ref), [ObjectRef(each.key, each.num_bytes, each.digest) for each in head.objects]
        _require_attempt(head.job, ref.attempt, context)
        memory = self._memory_of(head.job)
        if memory.begin(ref, head.owner, objects):
            for request in request_iterator:
                piece = request.piece
                memory.write(ref, head.owner, piece.key, piece.offset, piece.data)
            memory.finish(ref, head.owner)
        return pb.PutShareResponse(digest=share_digest(objects))

    def ReadShare(  # noqa: N802
        self, request: pb.ReadShareRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadShareResponse]:
        _require_attempt(request.job, request.attempt, context)
        ref, memory = _ref(request.ref), self._memory_of(request.job)
        stop = request.offset + request.length
        for at in range(request.offset, stop, PIECE_BYTES):
            yield pb.ReadShareResponse(data=memory.read(ref, request.key, at, min(PIECE_BYTES, stop - at)))


def _head(requests: Iterator[pb.PutShareRequest]) -> pb.ShareHead:
    first = next(requests, None)
    if first is None or not first.HasField("head") or len(first.head.objects) > MAX_OBJECTS:
        raise PhalanxError(
            "share",
            expected=f"its head first, with at most {MAX_OBJECTS} objects",
            remedy="announce the share before its bytes",
        )
    return first.head


def _ref(message: checkpoint_pb.CheckpointRef) -> CheckpointRef:
    return CheckpointRef(message.attempt, message.step)


def _require_attempt(job: str, attempt: int, context: grpc.ServicerContext) -> None:
    """Raises Denied unless the caller's token was made for that attempt: an agent's own is for no gang."""
    name = JobName.parse(job)
    caller(context).require_job(name.project, name.uid, attempt)
    if not caller(context).attempt:
        raise Denied(
            "scope of the token",
            value="no attempt",
            expected=f"a token for attempt {attempt} of {job}",
            remedy="use the token that came with the order to start the gang",
        )
