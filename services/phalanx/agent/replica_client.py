"""The memory of another node, called. Every call has a deadline; one that is broken off leaves nothing behind there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phalanx.agent.replicas import PIECE_BYTES
from phalanx.api.agent.v1 import replica_service_pb2 as pb
from phalanx.api.agent.v1.replica_service_pb2_grpc import ReplicaServiceStub
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.rpc import Channel

READ_DEADLINE_S = 60.0


class PeerMemory:
    """A partner node's memory of one job. attempt: on behalf of which it is read. token: metadata of each call, where
    the channel carries none. Raises OutsideError where the node does not answer, PhalanxError where it refuses.
    """

    def __init__(
        self, channel: Channel, job: str, attempt: int, token: tuple[tuple[str, str | bytes], ...] | None = None
    ) -> None:
        self._stub, self._job, self._attempt, self._token = ReplicaServiceStub(channel), job, attempt, token

    def put(
        self,
        ref: CheckpointRef,
        owner: str,
        objects: Sequence[ObjectRef],
        view_of: Callable[[ObjectRef], memoryview],
        deadline_s: float,
    ) -> str:
        """Sends a share; returns its digest when it lies whole there. view_of: the bytes of an object."""
        requests = _requests(self._job, ref, owner, objects, view_of)
        return str(self._stub.PutShare(requests, timeout=deadline_s, metadata=self._token).digest)

    def read(self, ref: CheckpointRef, key: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of an object."""
        request = pb.ReadShareRequest(
            job=self._job, attempt=self._attempt, ref=_ref(ref), key=key, offset=offset, length=length
        )
        pieces = self._stub.ReadShare(request, timeout=READ_DEADLINE_S, metadata=self._token)
        data = b"".join(piece.data for piece in pieces)
        if len(data) != length:
            raise OutsideError(f"{len(data)} bytes of {key} came of {length}")
        return data


def _requests(
    job: str,
    ref: CheckpointRef,
    owner: str,
    objects: Sequence[ObjectRef],
    view_of: Callable[[ObjectRef], memoryview],
) -> Iterator[pb.PutShareRequest]:
    named = [checkpoint_pb.StoredObject(key=each.key, num_bytes=each.num_bytes, digest=each.digest) for each in objects]
    yield pb.PutShareRequest(head=pb.ShareHead(job=job, ref=_ref(ref), owner=owner, objects=named))
    for each in objects:
        view = view_of(each)
        for at in range(0, each.num_bytes, PIECE_BYTES):
            data = bytes(view[at : at + PIECE_BYTES])
            yield pb.PutShareRequest(piece=pb.SharePiece(key=each.key, offset=at, data=data))


def _ref(ref: CheckpointRef) -> checkpoint_pb.CheckpointRef:
    return checkpoint_pb.CheckpointRef(attempt=ref.attempt, step=ref.step)
