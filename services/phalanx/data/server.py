"""Translates calls into the room's own words and back; decides nothing."""

from __future__ import annotations

import grpc

from phalanx.api.data.v1 import data_service_pb2 as pb
from phalanx.api.data.v1.data_service_pb2_grpc import DataServiceServicer
from phalanx.data.access import require_gang
from phalanx.data.datasets import Filter, check_request_id
from phalanx.data.reading import Reading
from phalanx.data.registration import Catalog
from phalanx.data.reports import Reports
from phalanx.data.wire import damage_message, version_message, weights_of
from phalanx.lineage.plan_message import plan_message
from phalanx.lineage.registry import JobName
from phalanx.rpc import caller


class DataServicer(DataServiceServicer):
    """`phalanx.api.data.v1.DataService`."""

    def __init__(self, catalog: Catalog, reading: Reading, reports: Reports) -> None:
        self._catalog, self._reading, self._reports = catalog, reading, reports

    def RegisterDataset(  # noqa: N802 - the contract's name
        self, request: pb.RegisterDatasetRequest, context: grpc.ServicerContext
    ) -> pb.RegisterDatasetResponse:
        version = self._catalog.register(
            request.request_id, request.dataset, request.url, caller(context).subject, tuple(request.made_from)
        )
        return pb.RegisterDatasetResponse(version=version_message(version))

    def GetDataset(  # noqa: N802 - the contract's name
        self, request: pb.GetDatasetRequest, context: grpc.ServicerContext
    ) -> pb.GetDatasetResponse:
        return pb.GetDatasetResponse(versions=map(version_message, self._catalog.versions(request.dataset)))

    def ListDatasets(  # noqa: N802 - the contract's name
        self, request: pb.ListDatasetsRequest, context: grpc.ServicerContext
    ) -> pb.ListDatasetsResponse:
        wanted = Filter(request.name_prefix, request.digest, request.owner, request.made_from)
        page = self._catalog.page(request.page_size, request.page_token, wanted)
        return pb.ListDatasetsResponse(versions=map(version_message, page.versions), next_page_token=page.next_token)

    def GetReadingPlan(  # noqa: N802 - the contract's name
        self, request: pb.GetReadingPlanRequest, context: grpc.ServicerContext
    ) -> pb.GetReadingPlanResponse:
        name = JobName.parse(request.job)
        require_gang(caller(context), name.project, name.uid, request.attempt)
        plan = self._reading.plan(name, request.attempt, request.step, request.horizon_steps)
        return pb.GetReadingPlanResponse(plan=plan_message(plan))

    def ReportDamage(  # noqa: N802 - the contract's name
        self, request: pb.ReportDamageRequest, context: grpc.ServicerContext
    ) -> pb.ReportDamageResponse:
        name = JobName.parse(request.job)
        require_gang(caller(context), name.project, name.uid, request.attempt)
        damage = self._reports.report(name, request.attempt, request.shard, request.why, request.step)
        return pb.ReportDamageResponse(damage=damage_message(damage))

    def ChangeMixture(  # noqa: N802 - the contract's name
        self, request: pb.ChangeMixtureRequest, context: grpc.ServicerContext
    ) -> pb.ChangeMixtureResponse:
        name = JobName.parse(request.job)
        caller(context).require_job(name.project, name.uid)
        check_request_id(request.request_id)
        wish = self._reading.wish(name, weights_of(request.weights), request.request_id)
        return pb.ChangeMixtureResponse(wish=wish.number)

    def ListDamage(  # noqa: N802 - the contract's name
        self, request: pb.ListDamageRequest, context: grpc.ServicerContext
    ) -> pb.ListDamageResponse:
        name = JobName.parse(request.job)
        caller(context).require_job(name.project, name.uid)
        return pb.ListDamageResponse(damages=map(damage_message, self._reports.damages(name)))
