"""The train service, called: plain frozen values in and out."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceStub
from phalanx.core.errors import PhalanxError
from phalanx.lineage.events import JobState
from phalanx.rpc import Channel, ClientConfig, Credentials, TimedOut, Unavailable, connect, connect_client, follow
from phalanx.rpc.asking import asked
from phalanx.rpc.retry import pause_s
from phalanx.train.logs import LogPiece
from phalanx.train.values import (
    Assignment,
    Cause,
    CheckpointRef,
    EventType,
    EventView,
    IncidentAction,
    Intent,
    JobView,
    NodeView,
    Origin,
    Submitted,
)
from phalanx.train.wire import event_message, event_of, job_of, node_of, state_message

__all__ = [
    "Assignment",
    "Cause",
    "CheckpointRef",
    "EventType",
    "EventView",
    "IncidentAction",
    "Intent",
    "JobState",
    "JobView",
    "LogPiece",
    "NodeView",
    "Origin",
    "Submitted",
    "TrainClient",
    "connect_train",
    "event_message",
]

LOG = logging.getLogger(__name__)
SERVICE: Final = "train"
# Every method may be repeated: writes by their request id.
IDEMPOTENT: Final = (
    "SubmitJob",
    "ForkJob",
    "GetJob",
    "ListJobs",
    "StopJob",
    "SuspendJob",
    "ResumeJob",
    "CheckpointJob",
    "TakeJobStacks",
    "ListNodes",
    "ReportIncident",
)
SUBMIT_DEADLINE_S, STREAM_S, LONGEST_PAUSE_S = 60.0, 3600.0, 2.0
SETTLED: Final = (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)
Request = TypeVar("Request")


class TrainClient:
    """One train service. Jobs go by `projects/<project>/jobs/<job>`, or `<job>` in the project `default`.

    Raises what `phalanx.rpc` raises: PhalanxErrors as the service raised them, Unavailable where it does not answer. A
    context manager closes the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._stub = channel, TrainServiceStub(channel)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> TrainClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, deadline_s: float) -> None:
        """Returns when the service serves; see `phalanx.rpc.Channel`."""
        self._channel.wait_ready(deadline_s)

    # Writes.

    def submit(self, spec: Mapping[str, Any], *, request_id: str = "", dry_run: bool = False) -> Submitted:
        """A new job from a job file's tables. The same request id again returns the same job."""
        request = asked(pb.SubmitJobRequest, request_id=_fresh(request_id), spec_json=json.dumps(spec), dry_run=dry_run)
        response = self._stub.SubmitJob(request, timeout=SUBMIT_DEADLINE_S)
        return Submitted(job_of(response.job), tuple(response.warnings))

    def fork(
        self,
        source: str,
        selector: str = "latest",
        overrides: Sequence[str] = (),
        *,
        name: str = "",
        request_id: str = "",
        dry_run: bool = False,
    ) -> Submitted:
        """A new job from a checkpoint of another: `latest`, a step, or `a<attempt>-s<step>`."""
        request = asked(
            pb.ForkJobRequest,
            request_id=_fresh(request_id),
            source=full_name(source),
            selector=selector,
            name=name,
            overrides=overrides,
            dry_run=dry_run,
        )
        response = self._stub.ForkJob(request, timeout=SUBMIT_DEADLINE_S)
        return Submitted(job_of(response.job), tuple(response.warnings))

    def stop(self, job: str, *, request_id: str = "", expected_revision: int = 0) -> JobView:
        """Has the job commit a checkpoint and end; returns at once."""
        return job_of(self._stub.StopJob(_write(pb.StopJobRequest, job, request_id, expected_revision)).job)

    def suspend(self, job: str, *, request_id: str = "", expected_revision: int = 0) -> JobView:
        """Has the job commit a checkpoint and free its nodes; returns at once."""
        return job_of(self._stub.SuspendJob(_write(pb.SuspendJobRequest, job, request_id, expected_revision)).job)

    def resume(
        self, job: str, overrides: Sequence[str] = (), *, request_id: str = "", expected_revision: int = 0
    ) -> JobView:
        """Has the job go on. overrides: `section.key=value`, placement and free keys."""
        request = _write(pb.ResumeJobRequest, job, request_id, expected_revision, overrides=overrides)
        return job_of(self._stub.ResumeJob(request).job)

    def checkpoint_now(self, job: str, *, request_id: str = "", expected_revision: int = 0) -> JobView:
        """Has a checkpoint taken at the next step boundary; the commit is an event."""
        request = _write(pb.CheckpointJobRequest, job, request_id, expected_revision)
        return job_of(self._stub.CheckpointJob(request).job)

    # Reads.

    def get(self, job: str) -> JobView:
        """The job as it stands."""
        return job_of(self._stub.GetJob(asked(pb.GetJobRequest, name=full_name(job))).job)

    def list(
        self, project: str = "", *, owner: str = "", states: Iterable[JobState] = (), page_size: int = 0
    ) -> Iterator[JobView]:
        """Jobs, newest first; pages are fetched as they are needed. Registered jobs that the service can't read are
        told in the log.
        """
        token = ""
        while True:
            request = asked(
                pb.ListJobsRequest,
                parent=f"projects/{project}" if project else "",
                owner=owner,
                states=[state_message(state) for state in states],
                page_size=page_size,
                page_token=token,
            )
            page = self._stub.ListJobs(request)
            for warning in page.warnings:
                LOG.warning("%s", warning)
            yield from map(job_of, page.jobs)
            token = page.next_page_token
            if not token:
                return

    def nodes(self) -> tuple[NodeView, ...]:
        """The nodes that are known, by name."""
        return tuple(map(node_of, self._stub.ListNodes(pb.ListNodesRequest()).nodes))

    def stacks(self, job: str, ranks: Sequence[int] = ()) -> Mapping[int, str]:
        """The Python stacks of ranks; none means all."""
        request = asked(pb.TakeJobStacksRequest, name=full_name(job), ranks=ranks)
        return dict(self._stub.TakeJobStacks(request, timeout=30.0).stacks)

    def watch(self, job: str, after_revision: int = 0, *, give_up_s: float | None = None) -> Iterator[EventView]:
        """The events behind a revision, each once and in order, then what comes, for ever: through restarts of the
        service and broken connections. Raises OutOfRange for a revision that is too old or unknown.
        """
        name = full_name(job)

        def start(after: int) -> Any:
            return self._stub.WatchJob(asked(pb.WatchJobRequest, name=name, after_revision=after), timeout=STREAM_S)

        for message in follow(
            start, _revision_of, after_revision, give_up_s=give_up_s, longest_pause_s=LONGEST_PAUSE_S
        ):
            if message.WhichOneof("message") == "event":
                yield event_of(message.event)

    def wait(
        self,
        job: str,
        *,
        until: Iterable[JobState] = SETTLED,
        timeout_s: float | None = None,
        on_event: Callable[[EventView], None] = lambda event: None,
    ) -> JobView:
        """The job once it is in one of the states (over, where none are named). Raises TimedOut."""
        wanted, ends_s = frozenset(until), None if timeout_s is None else time.monotonic() + timeout_s
        view = self.get(job)
        revision = view.revision
        while view.state not in wanted:
            left_s = STREAM_S if ends_s is None else ends_s - time.monotonic()
            if left_s <= 0:
                raise TimedOut(f"{view.name} is {view.state} after {timeout_s:.3g} s")
            revision = self._wait_once(view.name, revision, wanted, left_s, on_event)
            view = self.get(job)
        return view

    def _wait_once(
        self, name: str, after: int, wanted: frozenset[JobState], left_s: float, on_event: Callable[[EventView], None]
    ) -> int:
        """Reads one stream of events until a wanted state, its end or the time's; the last revision that it brought."""
        try:
            request = asked(pb.WatchJobRequest, name=name, after_revision=after)
            with self._stub.WatchJob(request, timeout=min(left_s, STREAM_S)) as stream:  # type: ignore[attr-defined]
                for message in stream:
                    if message.WhichOneof("message") != "event":
                        continue
                    event = event_of(message.event)
                    after = event.revision
                    on_event(event)
                    if event.state in wanted:
                        break
        except Unavailable:
            time.sleep(min(LONGEST_PAUSE_S, max(0.0, left_s), 0.2))
        return after

    def logs(
        self, job: str, rank: int = 0, *, attempt: int = 0, offset: int = 0, follow_on: bool = False
    ) -> Iterator[LogPiece]:
        """What a rank printed, from `offset` (negative: from the end). follow_on: with what comes, over attempts, until
        the job ends, through restarts of the service.
        """
        failures = 0
        while True:
            request = asked(
                pb.ReadJobLogsRequest, name=full_name(job), rank=rank, attempt=attempt, offset=offset, follow=follow_on
            )
            try:
                for piece in self._stub.ReadJobLogs(request, timeout=STREAM_S):
                    attempt, offset, failures = piece.attempt, piece.next_offset, 0
                    yield LogPiece(piece.data, piece.attempt, piece.next_offset)
                return
            except Unavailable:
                if not follow_on:
                    raise
                failures += 1
                time.sleep(pause_s(failures, longest_s=LONGEST_PAUSE_S))


def full_name(job: str) -> str:
    """`projects/<project>/jobs/<job>`, where a bare name is of the project `default`."""
    if not isinstance(job, str):
        raise PhalanxError("job", value=job, expected="the name of a job", remedy="give it as text")
    return job if "/" in job else f"projects/default/jobs/{job}"


def connect_train(to: ClientConfig | str, credentials: Credentials | None = None, **settings: Any) -> TrainClient:
    """A client by a context, or by host:port and credentials of one's own."""
    if isinstance(to, ClientConfig):
        return TrainClient(connect_client(to, SERVICE, idempotent=IDEMPOTENT, **settings))
    assert credentials is not None, "an address needs credentials"
    return TrainClient(connect(SERVICE, to, credentials, idempotent=IDEMPOTENT, **settings))


def _fresh(request_id: str) -> str:
    return request_id or uuid.uuid4().hex


def _write(kind: Callable[..., Request], job: str, request_id: str, expected_revision: int, **fields: Any) -> Request:
    return asked(
        kind, request_id=_fresh(request_id), name=full_name(job), expected_revision=expected_revision, **fields
    )


def _revision_of(message: pb.WatchJobResponse) -> int:
    return message.event.revision if message.WhichOneof("message") == "event" else message.bookmark.revision
