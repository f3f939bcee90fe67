"""The data service, called: plain frozen values in and out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from phalanx.api.data.v1 import data_service_pb2 as pb
from phalanx.api.data.v1.data_service_pb2_grpc import DataServiceStub
from phalanx.data.datasets import DatasetSplit, DatasetVersion, Filter
from phalanx.data.decisions import Action, Damage
from phalanx.data.wire import damage_from, version_of
from phalanx.lineage.plan import ReadingPlan
from phalanx.lineage.plan_message import plan_of, weight_messages
from phalanx.rpc import Channel, ClientConfig, Credentials, connect, connect_client
from phalanx.rpc.asking import asked

__all__ = ["Action", "Damage", "DataClient", "DatasetSplit", "DatasetVersion", "Filter", "ReadingPlan", "connect_data"]

SERVICE: Final = "data"
# Every method may be repeated: registrations by their request id, reports by the decision that is in the journal.
IDEMPOTENT: Final = (
    "RegisterDataset",
    "GetDataset",
    "ListDatasets",
    "GetReadingPlan",
    "ReportDamage",
    "ChangeMixture",
    "ListDamage",
)
REGISTER_DEADLINE_S, REPORT_DEADLINE_S = 60.0, 180.0


class DataClient:
    """One data service. Raises what `phalanx.rpc` raises: PhalanxErrors as the service raised them, Unavailable where
    it does not answer. A context manager closes the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._stub = channel, DataServiceStub(channel)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> DataClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(
        self,
        dataset: str,
        url: str,
        request_id: str | None = None,
        *,
        made_from: Iterable[str] = (),
        timeout_s: float = REGISTER_DEADLINE_S,
    ) -> DatasetVersion:
        """Registers the data below `url`, or returns the version that holds it already. made_from: the registered
        versions from which it was made, each as `NAME@VERSION`.
        """
        request = asked(
            pb.RegisterDatasetRequest,
            request_id=request_id or uuid.uuid4().hex,
            dataset=dataset,
            url=url,
            made_from=made_from,
        )
        return version_of(self._stub.RegisterDataset(request, timeout=timeout_s).version)

    def dataset(self, dataset: str) -> tuple[DatasetVersion, ...]:
        """All its versions, oldest first."""
        return tuple(map(version_of, self._stub.GetDataset(asked(pb.GetDatasetRequest, dataset=dataset)).versions))

    def datasets(self, wanted: Filter = Filter(), page_size: int = 0) -> Iterator[DatasetVersion]:  # noqa: B008 - frozen
        """The newest version of every dataset, by name; all versions that pass where `wanted` asks for more than
        names. Pages are fetched as they are needed.
        """
        request = asked(
            pb.ListDatasetsRequest,
            page_size=page_size,
            name_prefix=wanted.name_prefix,
            digest=wanted.digest,
            owner=wanted.owner,
            made_from=wanted.made_from,
        )
        while True:
            page = self._stub.ListDatasets(request)
            yield from map(version_of, page.versions)
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    def reading_plan(
        self, job: str, attempt: int, step: int, horizon_steps: int = 0, *, timeout_s: float | None = None
    ) -> ReadingPlan:
        """What the attempt may read once `step` is done; raises Superseded for an attempt that is not the newest."""
        request = asked(pb.GetReadingPlanRequest, job=job, attempt=attempt, step=step, horizon_steps=horizon_steps)
        return plan_of(self._stub.GetReadingPlan(request, timeout=timeout_s).plan)

    def report_damage(
        self, job: str, attempt: int, shard: str, why: str, step: int, *, timeout_s: float = REPORT_DEADLINE_S
    ) -> Damage:
        """The decision about a shard that could not be read; it is in the journal by then. The service reads the whole
        shard for it.
        """
        request = asked(pb.ReportDamageRequest, job=job, attempt=attempt, shard=shard, why=why, step=step)
        return damage_from(self._stub.ReportDamage(request, timeout=timeout_s).damage)

    def change_mixture(self, job: str, weights: Mapping[str, str], request_id: str | None = None) -> int:
        """Asks for other weights of sources, as text by name; the number of the wish. They hold from the next plan."""
        request = asked(
            pb.ChangeMixtureRequest,
            request_id=request_id or uuid.uuid4().hex,
            job=job,
            weights=weight_messages(weights),
        )
        return self._stub.ChangeMixture(request).wish

    def damages(self, job: str) -> tuple[Damage, ...]:
        """What was decided for a job, oldest first."""
        return tuple(map(damage_from, self._stub.ListDamage(asked(pb.ListDamageRequest, job=job)).damages))


def connect_data(to: ClientConfig | str, credentials: Credentials | None = None, **settings: Any) -> DataClient:
    """A client by a context, or by host:port and credentials of one's own (an agent on behalf of a gang)."""
    if isinstance(to, ClientConfig):
        return DataClient(connect_client(to, SERVICE, idempotent=IDEMPOTENT, **settings))
    assert credentials is not None, "an address needs credentials"
    return DataClient(connect(SERVICE, to, credentials, idempotent=IDEMPOTENT, **settings))
