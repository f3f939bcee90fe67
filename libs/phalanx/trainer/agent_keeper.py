"""The memory of this node's agent, as a rank sees it: shares go there, and a step that lies there is read in place."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, Manifest
from phalanx.snapshot.replica_share import Taken
from phalanx.trainer.agent_control import Agent

LOG = logging.getLogger(__name__)
FIND_DEADLINE_S = 10.0


class AgentKeeper:
    """See `replicator.Keeper`. gRPC is imported with the first call, as everywhere in a rank."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

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

    def held(self, ref: CheckpointRef) -> Mapping[str, memoryview]:
        """See `session.MemoryKeeper.held`: what can't be had in memory is read from storage."""
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
            for share in self._agent.call("FindShares", request, FIND_DEADLINE_S).shares:
                found |= _objects(share)
        except (PhalanxError, OutsideError, OSError) as error:
            LOG.warning("%s is read from storage: %s", ref, error)
            return {}
        LOG.info("%d objects of %s lie in the memory of this node", len(found), ref)
        return found


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
