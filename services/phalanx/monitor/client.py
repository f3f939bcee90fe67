"""The monitor, called: messages of its contract, kept up through restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.api.monitor.v1.monitor_service_pb2_grpc import MonitorServiceStub
from phalanx.rpc import Channel, ClientConfig, Credentials, connect, connect_client, follow
from phalanx.rpc.asking import asked

SERVICE: Final = "monitor"
IDEMPOTENT: Final = ("ListRuns", "GetRun", "ListIncidents", "ListGpus")


class MonitorClient:
    """One monitor. Raises what `phalanx.rpc` raises. A context manager closes the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._stub = channel, MonitorServiceStub(channel)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> MonitorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def runs(self) -> tuple[pb.RunSummary, ...]:
        """The runs, newest first."""
        return tuple(self._stub.ListRuns(pb.ListRunsRequest()).runs)

    def run(self, job: str, max_points: int = 2000, after_step: int = 0) -> pb.GetRunResponse:
        """A run with its curve, thinned to `max_points`; raises NotFound."""
        return self._stub.GetRun(asked(pb.GetRunRequest, job=job, max_points=max_points, after_step=after_step))

    def whole_run(self, job: str) -> pb.GetRunResponse:
        """A run with every step, in as many calls as it takes."""
        answer = self.run(job, max_points=0)
        while answer.curve.step and answer.curve.step[-1] < answer.summary.step:
            more = self.run(job, max_points=0, after_step=answer.curve.step[-1]).curve
            if not more.step:
                break
            answer.curve.MergeFrom(more)
        return answer

    def watch(
        self, job: str, after_version: int = 0, *, stop: threading.Event | None = None, give_up_s: float | None = None
    ) -> Iterator[pb.WatchRunResponse]:
        """What is new about a run, through restarts of the monitor, until `stop`. Raises Unavailable after `give_up_s`
        without an answer (None: never).
        """

        def start(version: int) -> Iterator[pb.WatchRunResponse]:
            return self._stub.WatchRun(asked(pb.WatchRunRequest, job=job, after_version=version))

        return follow(start, lambda change: change.version, after_version, give_up_s=give_up_s, stop=stop)

    def incidents(self, job: str = "") -> tuple[pb.Incident, ...]:
        """The incidents of a job, or all, oldest first."""
        return tuple(self._stub.ListIncidents(asked(pb.ListIncidentsRequest, job=job)).incidents)

    def gpus(self) -> pb.ListGpusResponse:
        """The GPUs with their last readings, and where those come from."""
        return self._stub.ListGpus(pb.ListGpusRequest())


def connect_monitor(to: ClientConfig | str, credentials: Credentials | None = None, **settings: Any) -> MonitorClient:
    """A client by a context, or by host:port and credentials."""
    if isinstance(to, ClientConfig):
        return MonitorClient(connect_client(to, SERVICE, idempotent=IDEMPOTENT, **settings))
    assert credentials is not None, "an address needs credentials"
    return MonitorClient(connect(SERVICE, to, credentials, idempotent=IDEMPOTENT, **settings))
