"""An agent as ranks see it, over the lineage of one job: real gRPC on a Unix socket, without the services behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.api.agent.v1 import rank_service_pb2_grpc as pb_grpc
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.api.data.v1 import data_service_pb2 as data_pb
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.damage import report_damage
from phalanx.lineage.plan import reading_plan
from phalanx.objects import ObjectStore
from phalanx.rpc import AGENTS, Server, Superseded, serve_unix
from phalanx.rpc.handlers import ended
from phalanx.snapshot.commit import commit
from phalanx.snapshot.draft_message import draft_of

JOB = "projects/default/jobs/tiny"
METHODS = ("Open", "Renew", "RefuseParent", "ReportShardDamage", "WatchOrders", "Commit")
ACCESS = {f"/phalanx.api.agent.v1.RankService/{method}": AGENTS for method in METHODS}
COMMIT_DEADLINE_S = 20.0


class RankServer(pb_grpc.RankServiceServicer):
    """Answers from the lineage. What it was told outlives `stop` and `start`, as an agent's memory does a partition.

    decision: of every report of a damaged shard. calls: names of the calls, in their order.
    """

    def __init__(self, socket: Path, store: ObjectStore, horizon_steps: int = 16) -> None:
        self.socket, self.lineage, self._store, self._horizon_steps = socket, Lineage(store), store, horizon_steps
        self.decision = data_pb.DAMAGE_ACTION_STOP
        self.calls: list[str] = []
        self.shards: list[tuple[str, str, int]] = []
        self._orders: list[int] = []
        self._changed = threading.Condition()
        self._server: Server | None = None

    def start(self) -> None:
        """Serves on the socket."""
        adder = lambda server: pb_grpc.add_RankServiceServicer_to_server(self, server)  # noqa: E731
        self._server = serve_unix(self.socket, [adder], ACCESS)

    def stop(self) -> None:
        """Is away; calls in progress are cancelled."""
        if self._server is not None:
            self._server.stop(0.0)
            self._server = None

    def give(self, order: int) -> None:
        """Adds an order."""
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    def _require_newest(self, attempt: int) -> None:
        newest = self.lineage.newest_attempt()
        if newest is not None and newest.number > attempt:
            raise Superseded(f"attempt {attempt}", expected=f"attempt {newest.number}, the newest", remedy="nothing")

    def _plan(self, attempt: int, step: int) -> data_pb.ReadingPlan:
        self._require_newest(attempt)
        plan = reading_plan(self.lineage.journal(attempt), step, self._horizon_steps)
        spans = [data_pb.Span(start=start, stop=stop) for start, stop in plan.zero_weight]
        return data_pb.ReadingPlan(
            horizon_step=plan.horizon_step, zero_weight=spans, journal_digest=plan.journal_digest
        )

    def Open(self, request: pb.OpenRequest, context: grpc.ServicerContext) -> pb.OpenResponse:  # noqa: N802
        self.calls.append("Open")
        (attempt,) = [each for each in self.lineage.attempts() if each.number == request.attempt]
        ref = attempt.parent and checkpoint_pb.CheckpointRef(attempt=attempt.parent.attempt, step=attempt.parent.step)
        return pb.OpenResponse(parent=ref, plan=self._plan(request.attempt, attempt.start_step))

    def Renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.RenewResponse:  # noqa: N802
        self.calls.append("Renew")
        return pb.RenewResponse(plan=self._plan(request.attempt, request.step))

    def RefuseParent(  # noqa: N802
        self, request: pb.RefuseParentRequest, context: grpc.ServicerContext
    ) -> pb.RefuseParentResponse:
        self.calls.append("RefuseParent")
        self._require_newest(request.attempt)
        parent = CheckpointRef(request.parent.attempt, request.parent.step)
        report_damage(self.lineage, request.attempt, parent, 0, request.why)
        return pb.RefuseParentResponse()

    def ReportShardDamage(  # noqa: N802
        self, request: pb.ReportShardDamageRequest, context: grpc.ServicerContext
    ) -> pb.ReportShardDamageResponse:
        self.calls.append("ReportShardDamage")
        self._require_newest(request.attempt)
        self.shards.append((request.shard, request.why, request.step))
        return pb.ReportShardDamageResponse(damage=data_pb.Damage(shard=request.shard, action=self.decision))

    def WatchOrders(  # noqa: N802
        self, request: pb.WatchOrdersRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchOrdersResponse]:
        self.calls.append("WatchOrders")
        over, after = ended(context), request.after
        while not over.is_set():
            self._require_newest(request.attempt)
            with self._changed:
                if not self._orders[after:]:
                    self._changed.wait(0.1)
                    continue
                order = self._orders[after]
            after += 1
            yield pb.WatchOrdersResponse(number=after, order=pb.RankOrder.Name(order))

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:  # noqa: N802
        self.calls.append("Commit")
        draft: Any = request.draft
        self._require_newest(draft.ref.attempt)
        left_s = min(context.time_remaining() or COMMIT_DEADLINE_S, COMMIT_DEADLINE_S)
        commit(self.lineage, self._store, draft_of(draft), draft.world_size, left_s)
        return pb.CommitResponse()
