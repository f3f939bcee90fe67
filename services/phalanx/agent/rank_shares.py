"""Shares between the ranks of this node and its memory, translated."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from phalanx.agent.gangs import GangKey, HeldGang
from phalanx.agent.replica_keeper import ReplicaKeeper
from phalanx.agent.replicas import Head
from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.core import anonymous
from phalanx.core.errors import OutsideError, PhalanxError
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
        pid = self._pid(request.job, request.attempt, request.rank)
        kept = Kept(CheckpointRef(request.attempt, request.step), request.rank, request.world_size)
        draft = request.draft.SerializeToString(deterministic=True) if request.HasField("draft") else b""
        head = Head(request.job, kept, request.sealed_step, _placed(request.objects), request.num_bytes, draft)
        self._keeper.hand_over(head, pid, request.descriptor, deadline_s)

    def found(self, request: pb.FindSharesRequest) -> pb.FindSharesResponse:
        """What lies here of a step, and whether more of it lies elsewhere."""
        if self._keeper is None:
            return pb.FindSharesResponse()
        ref = CheckpointRef(request.ref.attempt, request.ref.step)
        held = self._keeper.memory.held(request.job, ref)
        for each in held:
            each.lend()
        shares = [
            pb.HeldShare(
                path=f"/proc/{os.getpid()}/fd/{each.descriptor}",
                num_bytes=each.head.num_bytes,
                objects=map(_placed_message, each.head.objects),
            )
            for each in held
        ]
        is_elsewhere = self._keeper.is_elsewhere(GangKey(request.job, request.attempt), ref)
        return pb.FindSharesResponse(shares=shares, elsewhere=is_elsewhere)

    def read(self, request: pb.ReadShareRequest, deadline_s: float) -> pb.ReadShareResponse:
        """Brings bytes that other nodes keep into memory of the rank, or says why not. Raises PhalanxError for a
        request that makes no sense.
        """
        if self._keeper is None:
            return pb.ReadShareResponse(why="this agent keeps nothing in memory")
        key, pid = GangKey(request.job, request.attempt), self._pid(request.job, request.attempt, request.rank)
        try:
            with _rank_memory(pid, request.descriptor, request.length) as into:
                num_bytes = self._keeper.read(key, request.key, request.offset, into, deadline_s)
        except (OutsideError, OSError) as error:
            return pb.ReadShareResponse(why=str(error))
        return pb.ReadShareResponse(num_bytes=num_bytes)

    def _pid(self, job: str, attempt: int, rank: int) -> int:
        held = self._gang_of(GangKey(job, attempt))
        if held is None or rank not in held.pids:
            raise FailedPrecondition(
                f"rank {rank} of attempt {attempt}", expected="one that lives here", remedy="end it"
            )
        return held.pids[rank]


@contextmanager
def _rank_memory(pid: int, descriptor: int, num_bytes: int) -> Iterator[memoryview]:
    """The first bytes of an anonymous file of a rank. Raises OSError where the rank is gone, PhalanxError for another
    file.
    """
    if not num_bytes:
        yield memoryview(b"")
        return
    file = anonymous.opened(pid, descriptor, num_bytes, writable=True) if num_bytes > 0 else None
    if file is None:
        raise PhalanxError(
            "memory of a rank",
            value=f"descriptor {descriptor}",
            expected=f"at least {num_bytes} bytes of anonymous memory that can't shrink",
            remedy="read from storage",
        )
    try:
        with mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED) as memory, memoryview(memory) as view:
            yield view
    finally:
        os.close(file)


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
