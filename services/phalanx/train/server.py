"""Translates calls into the room's own words and back; decides nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from phalanx.api.agent.v1 import record_pb2
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceServicer
from phalanx.core.errors import PhalanxError
from phalanx.lineage.events import JobEvent
from phalanx.lineage.registry import JobName
from phalanx.rpc import caller, ended
from phalanx.rpc.errors import FailedPrecondition, NotFound
from phalanx.train.book import Book
from phalanx.train.controller import Controller
from phalanx.train.incidents import Incidents, Verdict
from phalanx.train.launch.base import GangKey, Launcher, To
from phalanx.train.logs import Logs
from phalanx.train.records import LastSteps, RecordLog, Told
from phalanx.train.requests import Asked, Requests
from phalanx.train.shares import free_slots
from phalanx.train.states import Intent, Job
from phalanx.train.turns import age
from phalanx.train.values import IncidentAction, JobView, NodeView
from phalanx.train.wire import cause_of, event_message, job_message, job_view, node_message, state_of

DEFAULT_PAGE, LARGEST_PAGE = 100, 1000
BOOKMARK_S, STACKS_DEADLINE_S = 2.0, 8.0


class TrainServicer(TrainServiceServicer):
    """`phalanx.api.train.v1.TrainService`."""

    def __init__(
        self, book: Book, controller: Controller, launcher: Launcher, records: RecordLog, steps: LastSteps
    ) -> None:
        self._book, self._controller, self._launcher = book, controller, launcher
        self._records, self._steps = records, steps
        self._requests, self._incidents, self._logs = Requests(book), Incidents(book), Logs(book, launcher)

    # Jobs.

    def SubmitJob(  # noqa: N802 - the contract's name
        self, request: pb.SubmitJobRequest, context: grpc.ServicerContext
    ) -> pb.SubmitJobResponse:
        tables = _tables(request.spec_json)
        section = tables.get("job")
        project = section.get("project", "default") if isinstance(section, dict) else "default"
        caller(context).require_project(str(project))
        asked = Asked(caller(context).subject, request.request_id)
        taken = self._requests.submit(asked, tables, dry_run=request.dry_run)
        return pb.SubmitJobResponse(job=self._message(taken.job), warnings=taken.warnings)

    def ForkJob(  # noqa: N802 - the contract's name
        self, request: pb.ForkJobRequest, context: grpc.ServicerContext
    ) -> pb.ForkJobResponse:
        source, asked = self._named(request.source, context), Asked(caller(context).subject, request.request_id)
        taken = self._requests.fork(
            asked, source, request.selector, request.name, tuple(request.overrides), dry_run=request.dry_run
        )
        return pb.ForkJobResponse(job=self._message(taken.job), warnings=taken.warnings)

    def GetJob(  # noqa: N802 - the contract's name
        self, request: pb.GetJobRequest, context: grpc.ServicerContext
    ) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=self._message(self._book.job(self._named(request.name, context))))

    def ListJobs(  # noqa: N802 - the contract's name
        self, request: pb.ListJobsRequest, context: grpc.ServicerContext
    ) -> pb.ListJobsResponse:
        project = _project(request.parent)
        if project:
            caller(context).require_project(project)
        size, before = _page_size(request.page_size), _page_start(request.page_token)
        scope, states = caller(context).project, {state_of(state) for state in request.states}
        jobs = sorted(self._book.jobs(), key=age, reverse=True)
        wanted = [
            job
            for job in jobs
            if project in ("", job.name.project)
            and scope in ("", job.name.project)
            and request.owner in ("", job.registered.owner)
            and (not states or job.state in states)
            and (before is None or age(job) < before)
        ]
        token = _page_token(wanted[size - 1]) if len(wanted) > size else ""
        left_out = self._book.left_out().items() if before is None else ()
        told = [why for name, why in left_out if project in ("", name.project) and scope in ("", name.project)]
        return pb.ListJobsResponse(jobs=map(self._message, wanted[:size]), next_page_token=token, warnings=told)

    def StopJob(  # noqa: N802 - the contract's name
        self, request: pb.StopJobRequest, context: grpc.ServicerContext
    ) -> pb.StopJobResponse:
        name, asked = self._asked(request, context)
        return pb.StopJobResponse(job=self._message(self._requests.stop(asked, name)))

    def SuspendJob(  # noqa: N802 - the contract's name
        self, request: pb.SuspendJobRequest, context: grpc.ServicerContext
    ) -> pb.SuspendJobResponse:
        name, asked = self._asked(request, context)
        return pb.SuspendJobResponse(job=self._message(self._requests.stop(asked, name, Intent.SUSPEND)))

    def ResumeJob(  # noqa: N802 - the contract's name
        self, request: pb.ResumeJobRequest, context: grpc.ServicerContext
    ) -> pb.ResumeJobResponse:
        name, asked = self._asked(request, context)
        return pb.ResumeJobResponse(job=self._message(self._requests.resume(asked, name, tuple(request.overrides))))

    def CheckpointJob(  # noqa: N802 - the contract's name
        self, request: pb.CheckpointJobRequest, context: grpc.ServicerContext
    ) -> pb.CheckpointJobResponse:
        name, asked = self._asked(request, context)
        return pb.CheckpointJobResponse(job=self._message(self._requests.checkpoint(asked, name)))

    # Watching.

    def WatchJob(  # noqa: N802 - the contract's name
        self, request: pb.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchJobResponse]:
        name, over, after = self._named(request.name, context), ended(context), request.after_revision
        context.add_callback(self._book.touch)
        self._book.check_revision(name, after)
        changes = -1
        while not over.is_set():
            changes = self._book.wait(changes, BOOKMARK_S)
            for event in self._book.events(name, after):
                yield pb.WatchJobResponse(event=event_message(event))
                after = event.number
            yield pb.WatchJobResponse(bookmark=pb.Bookmark(revision=after))

    def ReadJobLogs(  # noqa: N802 - the contract's name
        self, request: pb.ReadJobLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadJobLogsResponse]:
        name, over = self._named(request.name, context), ended(context)
        pieces = self._logs.read(name, request.rank, request.attempt, request.offset, over, follow=request.follow)
        for piece in pieces:
            yield pb.ReadJobLogsResponse(data=piece.data, attempt=piece.attempt, next_offset=piece.next_offset)

    def TakeJobStacks(  # noqa: N802 - the contract's name
        self, request: pb.TakeJobStacksRequest, context: grpc.ServicerContext
    ) -> pb.TakeJobStacksResponse:
        job = self._book.job(self._named(request.name, context))
        if job.start is None or not job.is_live:
            raise FailedPrecondition(
                str(job.name), value=str(job.state), expected="a job whose ranks live", remedy="look at its logs"
            )
        held = {rank for each in job.start.placement for rank in each.ranks}
        if foreign := sorted(set(request.ranks) - held):
            raise NotFound("rank", value=foreign[0], expected=f"a rank from 0 to {max(held)}", remedy="correct it")
        stacks: dict[int, str] = {}
        for each in job.start.placement:
            wanted = set(each.ranks) & set(request.ranks) if request.ranks else set(each.ranks)
            if wanted:
                to = To(each.node_id, job.start.instances[each.node_id])
                key = GangKey(str(job.name), job.attempt)
                stacks |= self._launcher.stacks(to, key, sorted(wanted), STACKS_DEADLINE_S)
        return pb.TakeJobStacksResponse(stacks=stacks)

    def ListNodes(  # noqa: N802 - the contract's name
        self, request: pb.ListNodesRequest, context: grpc.ServicerContext
    ) -> pb.ListNodesResponse:
        nodes = self._launcher.nodes()
        free = free_slots(nodes, self._book.jobs())
        return pb.ListNodesResponse(nodes=[node_message(NodeView(node, free[node.node_id])) for node in nodes])

    # The monitor.

    def WatchRecords(  # noqa: N802 - the contract's name
        self, request: pb.WatchRecordsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchRecordsResponse]:
        over = ended(context)
        context.add_callback(self._records.wake)
        for told in self._records.watch(request.log_id, request.after, over.is_set):
            yield _told_message(self._records.log_id, told)

    def ReportIncident(  # noqa: N802 - the contract's name
        self, request: pb.ReportIncidentRequest, context: grpc.ServicerContext
    ) -> pb.ReportIncidentResponse:
        verdict = Verdict(
            request.request_id,
            request.attempt,
            cause_of(request.cause),
            _action_of(request.action),
            request.first_step,
            request.last_step,
        )
        done = self._incidents.report(self._named(request.job, context), verdict, caller(context).subject)
        action = pb.IncidentAction.Value(f"INCIDENT_ACTION_{done.action.upper()}")
        return pb.ReportIncidentResponse(action=action, message=done.why)

    # Below: what the above share.

    def _named(self, text: str, context: grpc.ServicerContext) -> JobName:
        name = JobName.parse(text)
        caller(context).require_job(name.project, name.uid)
        return name

    def _asked(self, request: Any, context: grpc.ServicerContext) -> tuple[JobName, Asked]:
        asked = Asked(caller(context).subject, request.request_id, request.expected_revision)
        return self._named(request.name, context), asked

    def _message(self, job: Job) -> pb.Job:
        return job_message(self.view(job))

    def view(self, job: Job) -> JobView:
        """The job as clients see it, with what its ranks told last."""
        told = self._steps.of(str(job.name))
        if told is None or told.attempt != job.attempt:
            return job_view(job, waits=self._controller.waits(job.name))
        waits = self._controller.waits(job.name)
        return job_view(
            job,
            step=told.step,
            loss=told.loss,
            epochs=told.epochs,
            replica_bytes_per_token=told.replica_bytes_per_token,
            step_parts=told.parts,
            expert_load=told.experts,
            evaluation=told.evaluation,
            waits=waits,
        )


def _tables(text: str) -> Mapping[str, Any]:
    try:
        tables = json.loads(text)
    except (ValueError, RecursionError):
        tables = None
    if not isinstance(tables, dict):
        raise PhalanxError("spec_json", expected="a job file as a JSON object", remedy="use `phalanx job submit`")
    return tables


def _project(parent: str) -> str:
    kind, _, project = parent.partition("/")
    if parent and (kind != "projects" or not project or "/" in project):
        raise PhalanxError("parent", value=parent, expected="projects/<project>, or nothing", remedy="correct it")
    return project


def _page_size(asked: int) -> int:
    if not 0 <= asked <= LARGEST_PAGE:
        raise PhalanxError(
            "page_size", value=asked, expected=f"from 0 to {LARGEST_PAGE}", remedy=f"0 means {DEFAULT_PAGE}"
        )
    return asked or DEFAULT_PAGE


def _page_token(job: Job) -> str:
    return base64.urlsafe_b64encode(json.dumps(age(job)).encode()).decode()


def _page_start(token: str) -> tuple[str, str] | None:
    if not token:
        return None
    try:
        created, name = json.loads(base64.urlsafe_b64decode(token))
    except (ValueError, TypeError):
        raise PhalanxError(
            "page_token", value=token, expected="next_page_token of the page before", remedy="begin anew"
        ) from None
    return str(created), str(name)


def _action_of(action: int) -> IncidentAction:
    if action not in pb.IncidentAction.values() or not action:
        raise PhalanxError("action", value=action, expected="an action", remedy="name one")
    name = pb.IncidentAction.Name(action)  # type: ignore[arg-type]
    return IncidentAction(name.removeprefix("INCIDENT_ACTION_").lower())


def _told_message(log_id: str, told: Told) -> pb.WatchRecordsResponse:
    message = pb.WatchRecordsResponse(log_id=log_id, number=told.number, job=told.job)
    if isinstance(told.what, JobEvent):
        message.event.CopyFrom(event_message(told.what))
    elif isinstance(told.what, record_pb2.Record):
        message.record.CopyFrom(told.what)
    return message
