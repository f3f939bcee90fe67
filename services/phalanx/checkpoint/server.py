"""The contract, translated: each method checks the caller's scope, calls one thing, and answers."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as pb
from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceServicer
from phalanx.checkpoint import wire
from phalanx.checkpoint.access import require_gang
from phalanx.checkpoint.catalog import Catalog, State, View
from phalanx.checkpoint.commits import COMMIT_DEADLINE_S, Commits, report, require_same
from phalanx.checkpoint.curator import Asking, Curator
from phalanx.checkpoint.jobs import HostedJob, Jobs
from phalanx.checkpoint.names import Selector, parse_selector, ref_text
from phalanx.checkpoint.verifying import Verifier
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject
from phalanx.lineage.registry import JobName
from phalanx.rpc import FailedPrecondition, TimedOut, caller, ended
from phalanx.snapshot import IncompleteCheckpoint

PAGE, LARGEST_PAGE = 100, 1000


class CheckpointServicer(CheckpointServiceServicer):
    """Serves `phalanx.api.checkpoint.v1.CheckpointService`."""

    def __init__(self, jobs: Jobs, commits: Commits, catalog: Catalog, curator: Curator, verifier: Verifier) -> None:
        self._jobs, self._commits, self._catalog = jobs, commits, catalog
        self._curator, self._verifier = curator, verifier

    # A gang's writes.

    def BeginCheckpoint(  # noqa: N802
        self, request: pb.BeginCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.BeginCheckpointResponse:
        ref = wire.from_ref(request.ref)
        self._commits.begin(self._gang_job(request.job, ref.attempt, context), ref)
        return pb.BeginCheckpointResponse()

    def CommitCheckpoint(  # noqa: N802
        self, request: pb.CommitCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.CommitCheckpointResponse:
        draft = wire.from_draft(request.draft)
        job = self._gang_job(request.job, draft.attempt, context)
        asked_s = request.deadline.ToNanoseconds() / 1e9
        flight = self._commits.commit(job, draft, asked_s if asked_s > 0 else COMMIT_DEADLINE_S)
        over = ended(context)
        flight.add_done_callback(lambda _: over.set())
        over.wait()
        if not flight.done():
            raise TimedOut(f"checkpoint {draft.ref} is still being committed; ask again")
        try:
            done = flight.result()
            require_same(draft, done.manifest)
        except (IncompleteCheckpoint, DamagedObject) as error:
            # Not UNAVAILABLE: asking again would not mend it.
            context.abort(grpc.StatusCode.ABORTED, str(error))
        self._curator.wake(job)
        return pb.CommitCheckpointResponse(
            checkpoint=self._shown(job, self._catalog.committed(job, draft.ref, done.entry))
        )

    def AbortCheckpoint(  # noqa: N802
        self, request: pb.AbortCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.AbortCheckpointResponse:
        ref = wire.from_ref(request.ref)
        self._commits.abort(self._gang_job(request.job, ref.attempt, context), ref)
        return pb.AbortCheckpointResponse()

    def ReportDamage(  # noqa: N802
        self, request: pb.ReportDamageRequest, context: grpc.ServicerContext
    ) -> pb.ReportDamageResponse:
        job = self._gang_job(request.job, request.attempt, context)
        report(job, request.attempt, wire.from_ref(request.ref), request.why)
        return pb.ReportDamageResponse()

    # Questions.

    def ResolveCheckpoint(  # noqa: N802
        self, request: pb.ResolveCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.ResolveCheckpointResponse:
        job = self._job(request.job, context)
        view = self._catalog.find(job, parse_selector(request.selector))
        if view.state != State.LIVE:
            raise FailedPrecondition(
                "selector", value=request.selector, expected=f"a live checkpoint; it is {view.state}", remedy=_LIST
            )
        return pb.ResolveCheckpointResponse(checkpoint=self._shown(job, view))

    def ListCheckpoints(  # noqa: N802
        self, request: pb.ListCheckpointsRequest, context: grpc.ServicerContext
    ) -> pb.ListCheckpointsResponse:
        job = self._job(request.job, context)
        after, size = _page(request)
        revision = self._curator.revision(job)
        views = [view for view in self._catalog.views(job) if request.include_dead or view.state == State.LIVE]
        rest = [view for view in views if after is None or view.ref > after]
        token = ref_text(rest[size - 1].ref) if len(rest) > size else ""
        shown = [self._shown(job, view) for view in rest[:size]]
        return pb.ListCheckpointsResponse(checkpoints=shown, next_page_token=token, revision=revision)

    def VerifyCheckpoint(  # noqa: N802
        self, request: pb.VerifyCheckpointRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.VerifyCheckpointResponse]:
        job = self._job(request.job, context)
        selector = parse_selector(request.selector)
        ref = selector.ref if selector.ref is not None else self._catalog.find(job, selector).ref
        for progress in self._verifier.run(job, ref, ended(context)):
            yield wire.to_progress(progress)

    # An operator's writes.

    def PinCheckpoint(  # noqa: N802
        self, request: pb.PinCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.PinCheckpointResponse:
        job, asking = self._asking(request, context)
        view, revision = self._curator.pin(job, parse_selector(request.selector), request.reason, asking)
        return pb.PinCheckpointResponse(checkpoint=self._shown(job, view), revision=revision)

    def UnpinCheckpoint(  # noqa: N802
        self, request: pb.UnpinCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.UnpinCheckpointResponse:
        job, asking = self._asking(request, context)
        view, revision = self._curator.unpin(job, parse_selector(request.selector), asking)
        return pb.UnpinCheckpointResponse(checkpoint=self._shown(job, view), revision=revision)

    def DeleteCheckpoint(  # noqa: N802
        self, request: pb.DeleteCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.DeleteCheckpointResponse:
        job, asking = self._asking(request, context)
        selector = parse_selector(request.selector)
        if selector == Selector():
            raise PhalanxError("selector", value="latest", expected="a step or a<attempt>-s<step>", remedy=_LIST)
        num_objects, num_bytes = self._curator.delete(job, selector, asking)
        return pb.DeleteCheckpointResponse(num_objects=num_objects, num_bytes=num_bytes)

    def PruneCheckpoints(  # noqa: N802
        self, request: pb.PruneCheckpointsRequest, context: grpc.ServicerContext
    ) -> pb.PruneCheckpointsResponse:
        job = self._job(request.job, context)
        return wire.to_report(self._curator.prune(job, request.request_id, dry_run=request.dry_run))

    # Below: what the above share.

    def _job(self, name: str, context: grpc.ServicerContext) -> HostedJob:
        job = JobName.parse(name)
        caller(context).require_job(job.project, job.uid)
        return self._jobs.find(job)

    def _gang_job(self, name: str, attempt: int, context: grpc.ServicerContext) -> HostedJob:
        job = JobName.parse(name)
        require_gang(caller(context), job, attempt)
        return self._jobs.find(job)

    def _asking(
        self,
        request: pb.PinCheckpointRequest | pb.UnpinCheckpointRequest | pb.DeleteCheckpointRequest,
        context: grpc.ServicerContext,
    ) -> tuple[HostedJob, Asking]:
        job = self._job(request.job, context)
        return job, Asking(request.request_id, request.expected_revision, caller(context).subject)

    def _shown(self, job: HostedJob, view: View) -> pb.Checkpoint:
        return wire.to_view(job.name, view)


def _page(request: pb.ListCheckpointsRequest) -> tuple[CheckpointRef | None, int]:
    size = request.page_size or PAGE
    if not 1 <= size <= LARGEST_PAGE:
        raise PhalanxError(
            "page_size", value=request.page_size, expected=f"0 to {LARGEST_PAGE}", remedy="ask for several pages"
        )
    if not request.page_token:
        return None, size
    after = parse_selector(request.page_token, "page_token").ref
    if after is None:
        raise PhalanxError(
            "page_token", value=request.page_token, expected="the token of the page before", remedy="begin again"
        )
    return after, size


_LIST = "list the checkpoints"
