"""Translates calls; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.api.monitor.v1.monitor_service_pb2_grpc import MonitorServiceServicer
from phalanx.core.errors import PhalanxError
from phalanx.monitor.access import may_see, require_job
from phalanx.monitor.view import View
from phalanx.rpc import caller, ended


class MonitorServicer(MonitorServiceServicer):
    """`phalanx.api.monitor.v1.MonitorService`."""

    def __init__(self, view: View) -> None:
        self._view = view

    def ListRuns(  # noqa: N802 - the contract's name
        self, request: pb.ListRunsRequest, context: grpc.ServicerContext
    ) -> pb.ListRunsResponse:
        who, found = caller(context), self._view.list_runs()
        return pb.ListRunsResponse(runs=[run for run in found.runs if may_see(who, run.job)])

    def GetRun(  # noqa: N802 - the contract's name
        self, request: pb.GetRunRequest, context: grpc.ServicerContext
    ) -> pb.GetRunResponse:
        require_job(caller(context), request.job)
        _require_count("max_points", request.max_points)
        _require_count("after_step", request.after_step)
        return self._view.get_run(request.job, request.max_points, request.after_step)

    def WatchRun(  # noqa: N802 - the contract's name
        self, request: pb.WatchRunRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchRunResponse]:
        require_job(caller(context), request.job)
        return self._view.watch_run(request.job, request.after_version, ended(context))

    def ListIncidents(  # noqa: N802 - the contract's name
        self, request: pb.ListIncidentsRequest, context: grpc.ServicerContext
    ) -> pb.ListIncidentsResponse:
        who = caller(context)
        if request.job:
            require_job(who, request.job)
        found = self._view.list_incidents(request.job)
        return pb.ListIncidentsResponse(incidents=[each for each in found.incidents if may_see(who, each.job)])

    def ListGpus(  # noqa: N802 - the contract's name
        self, request: pb.ListGpusRequest, context: grpc.ServicerContext
    ) -> pb.ListGpusResponse:
        return self._view.list_gpus()


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise PhalanxError(name, value=value, expected="a number from 0", remedy="correct it")
