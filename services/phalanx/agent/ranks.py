"""What the agent does on behalf of a rank: asks data for plans and checkpoint for commits, with the attempt's token.

While a service is away the call is tried again, up to the deadline that the rank gave. A service that calls the attempt
superseded ends its ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from phalanx.agent.attempts import Attempt, Attempts
from phalanx.agent.gangs import GangKey
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from phalanx.api.data.v1 import data_service_pb2 as data_pb
from phalanx.api.data.v1.data_service_pb2_grpc import DataServiceStub
from phalanx.rpc.client import Channel
from phalanx.rpc.errors import Superseded

# All that is asked for ranks may be asked again.
DATA_METHODS = ("GetReadingPlan", "ReportDamage")
CHECKPOINT_METHODS = ("BeginCheckpoint", "CommitCheckpoint", "ReportDamage")
MARGIN_S = 0.25  # so that the rank hears the answer, not its own deadline
Response = TypeVar("Response")


class OnBehalf:
    """Calls to data and checkpoint for the attempts that live here. data, checkpoint: channels without a token.

    on_superseded, on_committed: told before the rank is.
    """

    def __init__(
        self,
        attempts: Attempts,
        data: Channel,
        checkpoint: Channel,
        on_superseded: Callable[[GangKey, str], None],
        on_committed: Callable[[GangKey, int], None],
    ) -> None:
        self._attempts = attempts
        self._data, self._checkpoint = DataServiceStub(data), CheckpointServiceStub(checkpoint)
        self._on_superseded, self._on_committed = on_superseded, on_committed

    def plan(self, key: GangKey, step: int, deadline_s: float) -> data_pb.ReadingPlan:
        """What the attempt may read after `step`."""
        request = data_pb.GetReadingPlanRequest(job=key.job, attempt=key.attempt, step=step)
        return self._call(key, self._data.GetReadingPlan, request, deadline_s).plan

    def report_shard(self, key: GangKey, shard: str, why: str, step: int, deadline_s: float) -> data_pb.Damage:
        """Tells of a damaged shard; the decision."""
        request = data_pb.ReportDamageRequest(job=key.job, attempt=key.attempt, shard=shard, why=why, step=step)
        return self._call(key, self._data.ReportDamage, request, deadline_s).damage

    def report_checkpoint(self, key: GangKey, ref: checkpoint_pb.CheckpointRef, why: str, deadline_s: float) -> None:
        """Tells of a parent that can't be restored."""
        request = checkpoint_pb.ReportDamageRequest(job=key.job, attempt=key.attempt, ref=ref, why=why)
        self._call(key, self._checkpoint.ReportDamage, request, deadline_s)

    def commit(self, key: GangKey, draft: checkpoint_pb.ManifestDraft, deadline_s: float) -> None:
        """Returns when the checkpoint exists."""
        begin = checkpoint_pb.BeginCheckpointRequest(job=key.job, ref=draft.ref, world_size=draft.world_size)
        self._call(key, self._checkpoint.BeginCheckpoint, begin, deadline_s)
        allowed = Duration()
        allowed.FromNanoseconds(int(min(self._attempts.get(key).save_s, deadline_s) * 1e9))
        request = checkpoint_pb.CommitCheckpointRequest(job=key.job, draft=draft, deadline=allowed)
        self._call(key, self._checkpoint.CommitCheckpoint, request, deadline_s)
        self._on_committed(key, draft.ref.step)

    def parent(self, key: GangKey) -> checkpoint_pb.CheckpointRef | None:
        """What the attempt starts from."""
        parent = self._attempts.get(key).parent
        return None if parent is None else checkpoint_pb.CheckpointRef(attempt=parent[0], step=parent[1])

    def _call(self, key: GangKey, method: Callable[..., Response], request: Any, deadline_s: float) -> Response:
        attempt: Attempt = self._attempts.get(key)
        shown = (("authorization", f"Bearer {attempt.token}"),)
        try:
            return method(request, timeout=max(0.01, deadline_s - MARGIN_S), metadata=shown)
        except Superseded as error:
            self._on_superseded(key, str(error))
            raise
