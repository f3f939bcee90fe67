"""Shares between the ranks of this node and its memory, translated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from phalanx.agent.gangs import GangKey, HeldGang
from phalanx.agent.replica_keeper import ReplicaKeeper
from phalanx.agent.replicas import Head
from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.rpc.errors import FailedPrecondition
from phalanx.snapshot.replicas import Kept, Placed


class RankShares:
    """gang_of: the living gang of an attempt here. keeper: None where this agent keeps nothing in memory."""

    def __init__(self, keeper: ReplicaKeeper | None, gang_of: Callable[[GangKey], HeldGang | None]) -> None:
        self._keeper, self._gang_of = keeper, gang_of

    def hand_over(self, request: pb.HandOverRequest, deadline_s: float) -> None:
        """Keeps a rank's share, here and with the partner. Raises PhalanxError and OutsideError."""
        if self._keeper is None:
            raise FailedPrecondition(
                "options.replica_fraction", expected="more than 0", remedy="set it in the agent's configuration"
            )
        held = self._gang_of(GangKey(request.job, request.attempt))
        if held is None or request.rank not in held.pids:
            raise FailedPrecondition(
                f"rank {request.rank} of attempt {request.attempt}", expected="one that lives here", remedy="end it"
            )
        kept = Kept(CheckpointRef(request.attempt, request.step), request.rank, request.world_size)
        draft = request.draft.SerializeToString(deterministic=True) if request.HasField("draft") else b""
        head = Head(request.job, kept, request.sealed_step, _placed(request.objects), request.num_bytes, draft)
        self._keeper.hand_over(head, held.pids[request.rank], request.descriptor, deadline_s)

    def found(self, job: str, ref: checkpoint_pb.CheckpointRef) -> list[pb.HeldShare]:
        """What lies here of a step."""
        if self._keeper is None:
            return []
        held = self._keeper.memory.held(job, CheckpointRef(ref.attempt, ref.step))
        return [
            pb.HeldShare(
                path=f"/proc/{os.getpid()}/fd/{each.descriptor}",
                num_bytes=each.head.num_bytes,
                objects=map(_placed_message, each.head.objects),
            )
            for each in held
        ]


def _placed(messages: Iterable[pb.PlacedObject]) -> tuple[Placed, ...]:
    if any(each.start < 0 or each.object.num_bytes < 0 for each in messages):
        raise PhalanxError("share", expected="objects that lie in its memory", remedy="announce it as it lies")
    return tuple(
        Placed(ObjectRef(each.object.key, each.object.num_bytes, each.object.digest), each.start) for each in messages
    )


def _placed_message(placed: Placed) -> pb.PlacedObject:
    ref = placed.ref
    stored = checkpoint_pb.StoredObject(key=ref.key, num_bytes=ref.num_bytes, digest=ref.digest)
    return pb.PlacedObject(object=stored, start=placed.start)
