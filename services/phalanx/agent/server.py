"""RankService: what ranks ask, translated."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from phalanx.agent.attempts import Attempts
from phalanx.agent.gangs import GangKey
from phalanx.agent.rank_shares import RankShares
from phalanx.agent.ranks import OnBehalf
from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.api.agent.v1.rank_service_pb2_grpc import RankServiceServicer
from phalanx.rpc.handlers import ended

DEFAULT_DEADLINE_S = 600.0


class RankServer(RankServiceServicer):
    """Serves the ranks of this node."""

    def __init__(self, attempts: Attempts, on_behalf: OnBehalf, shares: RankShares) -> None:
        self._attempts, self._on_behalf, self._shares = attempts, on_behalf, shares

    def Open(self, request: pb.OpenRequest, context: grpc.ServicerContext) -> pb.OpenResponse:  # noqa: N802
        key = GangKey(request.job, request.attempt)
        parent = self._on_behalf.parent(key)
        plan = self._on_behalf.plan(key, parent.step if parent is not None else 0, _left_s(context))
        return pb.OpenResponse(parent=parent, plan=plan)

    def Renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.RenewResponse:  # noqa: N802
        key = GangKey(request.job, request.attempt)
        return pb.RenewResponse(plan=self._on_behalf.plan(key, request.step, _left_s(context)))

    def RefuseParent(  # noqa: N802
        self, request: pb.RefuseParentRequest, context: grpc.ServicerContext
    ) -> pb.RefuseParentResponse:
        key = GangKey(request.job, request.attempt)
        self._on_behalf.report_checkpoint(key, request.parent, request.why, _left_s(context))
        return pb.RefuseParentResponse()

    def ReportShardDamage(  # noqa: N802
        self, request: pb.ReportShardDamageRequest, context: grpc.ServicerContext
    ) -> pb.ReportShardDamageResponse:
        key = GangKey(request.job, request.attempt)
        damage = self._on_behalf.report_shard(key, request.shard, request.why, request.step, _left_s(context))
        return pb.ReportShardDamageResponse(damage=damage)

    def WatchOrders(  # noqa: N802
        self, request: pb.WatchOrdersRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchOrdersResponse]:
        key = GangKey(request.job, request.attempt)
        self._attempts.get(key)
        for number, order in self._attempts.orders(key, request.after, ended(context)):
            yield pb.WatchOrdersResponse(number=number, order=order)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:  # noqa: N802
        key = GangKey(request.job, request.draft.ref.attempt)
        self._on_behalf.commit(key, request.draft, _left_s(context))
        return pb.CommitResponse()

    def HandOver(  # noqa: N802
        self, request: pb.HandOverRequest, context: grpc.ServicerContext
    ) -> pb.HandOverResponse:
        self._attempts.get(GangKey(request.job, request.attempt))
        self._shares.hand_over(request, _left_s(context))
        return pb.HandOverResponse()

    def FindShares(  # noqa: N802
        self, request: pb.FindSharesRequest, context: grpc.ServicerContext
    ) -> pb.FindSharesResponse:
        self._attempts.get(GangKey(request.job, request.attempt))
        return self._shares.found(request)

    def ReadShare(  # noqa: N802
        self, request: pb.ReadShareRequest, context: grpc.ServicerContext
    ) -> pb.ReadShareResponse:
        self._attempts.get(GangKey(request.job, request.attempt))
        return self._shares.read(request, _left_s(context))


def _left_s(context: grpc.ServicerContext) -> float:
    """How long the rank waits for its answer."""
    left_s = context.time_remaining()
    return DEFAULT_DEADLINE_S if left_s is None else min(left_s, DEFAULT_DEADLINE_S * 10)
