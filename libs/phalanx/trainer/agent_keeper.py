"""The memory of this node's agent, as a rank sees it: shares go there, and a step that lies there is read in place;
what other nodes keep of it comes by way of the agent.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.core import anonymous
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, Manifest
from phalanx.objects import ObjectStore
from phalanx.snapshot.holder_store import HolderStore
from phalanx.snapshot.replica_share import Taken
from phalanx.snapshot.replica_store import ReplicaStore
from phalanx.trainer.agent_control import Agent

LOG = logging.getLogger(__name__)
FIND_DEADLINE_S = 10.0
READ_DEADLINE_S = 60.0


class AgentKeeper:
    """See `replicator.Keeper`. gRPC is imported with the first call, as everywhere in a rank."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self._agent, self._rank = agent, rank

    def hand_over(self, taken: Taken, rank: int, sealed_step: int, draft: Manifest, deadline_s: float) -> None:
        """See `Keeper.hand_over`."""
        from phalanx.api.agent.v1 import rank_service_pb2 as pb
        from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
        from phalanx.snapshot.draft_message import draft_message

        request = pb.HandOverRequest(
            job=self._agent.place.job,
            attempt=draft.attempt,
            step=draft.step,
            rank=rank,
            world_size=draft.world_size,
            sealed_step=sealed_step,
            descriptor=taken.fd,
            num_bytes=taken.num_bytes,
            draft=draft_message(draft) if rank == 0 else None,
        )
        for each in taken.objects:
            stored = checkpoint_pb.StoredObject(key=each.ref.key, num_bytes=each.ref.num_bytes, digest=each.ref.digest)
            request.objects.append(pb.PlacedObject(object=stored, start=each.start))
        self._agent.call("HandOver", request, deadline_s)

    def source(self, storage: ObjectStore, ref: CheckpointRef) -> MemorySource:
        """See `session.MemoryKeeper.source`."""
        held, is_elsewhere = self._found(ref)
        if not is_elsewhere:
            return MemorySource(ReplicaStore(storage, held))
        others = HolderStore(storage, ref, self._reader())
        return MemorySource(ReplicaStore(others, held), others)

    def _reader(self) -> Callable[[str, int, int, Callable[[memoryview], None]], int]:
        """See `holder_store.Ask`."""
        from phalanx.api.agent.v1 import rank_service_pb2 as pb

        place = self._agent.place
        idle: list[_Landing] = []

        def ask(key: str, offset: int, length: int, use: Callable[[memoryview], None]) -> int:
            landing = (idle.pop() if idle else _Landing()).of(length)
            request = pb.ReadShareRequest(
                job=place.job,
                attempt=place.attempt,
                rank=self._rank,
                key=key,
                offset=offset,
                length=length,
                descriptor=landing.fd,
            )
            answer = self._agent.call("ReadShare", request, READ_DEADLINE_S)
            if answer.why:
                raise OutsideError(answer.why)
            if length:
                with memoryview(landing.memory) as view, view[:length] as found:
                    use(found)
            idle.append(landing)
            num_bytes: int = answer.num_bytes
            return num_bytes

        return ask

    def _found(self, ref: CheckpointRef) -> tuple[Mapping[str, memoryview], bool]:
        """The objects of the step that lie with this node's agent, by key, and whether other nodes keep some too; what
        can't be had in memory is read from storage.
        """
        from phalanx.api.agent.v1 import rank_service_pb2 as pb
        from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb

        place = self._agent.place
        request = pb.FindSharesRequest(
            job=place.job,
            attempt=place.attempt,
            ref=checkpoint_pb.CheckpointRef(attempt=ref.attempt, step=ref.step),
        )
        found: dict[str, memoryview] = {}
        try:
            answer = self._agent.call("FindShares", request, FIND_DEADLINE_S)
            for share in answer.shares:
                found |= _objects(share)
        except (PhalanxError, OutsideError, OSError) as error:
            LOG.warning("%s is read from storage: %s", ref, error)
            return {}, False
        LOG.info("%d objects of %s lie in the memory of this node", len(found), ref)
        return found, bool(answer.elsewhere)


class MemorySource:
    """Where a step is restored from, and what came of it. store: to be read. others: None where no other node is
    asked.
    """

    def __init__(self, store: ReplicaStore, others: HolderStore | None = None) -> None:
        self.store, self._others = store, others

    def told(self) -> dict[str, int | str]:
        """The fields of `restored`, as ranks report it."""
        others = self._others
        return {
            "memory_bytes": self.store.num_bytes,
            "holder_bytes": 0 if others is None else others.num_bytes,
            "storage_bytes": 0 if others is None else others.storage_bytes,
            "why": "" if others is None else others.why,
        }


class _Landing:
    """Anonymous memory of this rank into which the agent puts bytes; for one piece at a time."""

    def __init__(self) -> None:
        self.fd = anonymous.new_file("phalanx-landing")
        self.memory = mmap.mmap(-1, 1)
        weakref.finalize(self, os.close, self.fd)

    def of(self, num_bytes: int) -> _Landing:
        """Itself, with room for so many bytes."""
        if len(self.memory) < num_bytes:
            os.ftruncate(self.fd, num_bytes)
            self.memory = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return self


def _objects(share: Any) -> dict[str, memoryview]:
    """The objects of a share, mapped. Raises OSError where its memory is gone."""
    path = Path(share.path)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not str(path.readlink()).startswith("/memfd:"):
            raise OSError(f"{path} is no memory any more")
        memory = memoryview(mmap.mmap(file, share.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(file)
    found: dict[str, memoryview] = {}
    for each in share.objects:
        view = memory[each.start : each.start + each.object.num_bytes]
        if xxh3(view) == each.object.digest:  # damage of memory must not be told as damage of the checkpoint
            found[each.object.key] = view
        else:
            LOG.warning("%s in memory has other bytes than were kept: it is read from storage", each.object.key)
    return found
