"""What operators ask for: each request checked, then one event. Idempotent by request id."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import MOST_DIGITS, numbered
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.events import EventType, JobState
from phalanx.lineage.leases import leased
from phalanx.lineage.registry import JobName, Origin, RegisteredJob
from phalanx.planner.automatic import with_layout
from phalanx.rpc.errors import AlreadyExists, FailedPrecondition, NotFound
from phalanx.spec import Job as Spec
from phalanx.spec import parse_job
from phalanx.spec.changes import require_forkable, require_resumable
from phalanx.spec.job import plain
from phalanx.spec.source import apply_overrides
from phalanx.train.book import Book, Draft, now
from phalanx.train.decide import Record
from phalanx.train.partial import require_known
from phalanx.train.states import ON_NODES, RESUMABLE, Intent, Job, begin, state_after
from phalanx.trainer.places import job_store
from phalanx.trainer.promise import require_writable, warnings_of

_SELECTOR = re.compile(r"a([0-9]+)-s([0-9]+)")
_MAX_REQUEST_ID = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks, under which id, on which revision of the job (0: whichever)."""

    actor: str
    request_id: str
    expected_revision: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """A job that was taken, and what should be known although it is no error."""

    job: Job
    warnings: tuple[str, ...] = ()


class Requests:
    """Carries requests out on the book. Every method may raise what the book raises, and PhalanxError."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def submit(self, asked: Asked, tables: Mapping[str, Any], *, dry_run: bool = False) -> Taken:
        """A new job. Raises Problems with all that is wrong with the file, AlreadyExists where the name or the id is
        taken by another job.
        """
        spec = checked_spec(parse_job(tables, check_world=True))
        return self._take(asked, spec, None, dry_run=dry_run)

    def fork(
        self,
        asked: Asked,
        source: JobName,
        selector: str,
        name: str,
        overrides: Sequence[str],
        *,
        dry_run: bool = False,
    ) -> Taken:
        """A new job from a checkpoint of another one."""
        job = self._book.job(source)
        before = parse_job(job.spec)
        _refuse_two_names(name, overrides)
        named = [f"job.name={name or self._free_name(asked, source)}"]
        after = checked_spec(parse_job(apply_overrides(dict(job.spec), [*named, *overrides]), check_world=True))
        require_forkable(before, after)
        ref = resolve(Lineage(self._book.store(source)), selector)
        _require_steps_left(after, ref, "the fork starts from", "raise it, or start from an earlier checkpoint")
        require_known(before, after, self._book.store(source), ref)
        origin = Origin(source.project, source.uid, ref.attempt, ref.step)
        # Registered under a lease, a fork is seen by whoever would remove its origin, or sees that it is being removed.
        with nullcontext() if dry_run else leased(self._book.store(source), ref, "fork"):
            return self._take(asked, after, origin, dry_run=dry_run)

    def _free_name(self, asked: Asked, source: JobName) -> str:
        """The source's name with a number; the same again for the same request."""
        known = self._book.by_request(asked.request_id)
        if known is not None:
            return known.name.uid
        number = 2
        while self._book.find(JobName(source.project, f"{source.uid}-{number}")) is not None:
            number += 1
        return f"{source.uid}-{number}"

    def _take(self, asked: Asked, spec: Spec, origin: Origin | None, *, dry_run: bool) -> Taken:
        check_request_id(asked.request_id, is_needed=not dry_run or bool(asked.request_id))
        name = JobName(spec.job.project, spec.job.name)
        registered = RegisteredJob(
            name.project, name.uid, spec.job.storage, plain(spec), asked.request_id, asked.actor, now(), origin
        )
        existing = self._book.find(name)
        other = self._book.by_request(asked.request_id) if asked.request_id else None
        if existing is None and other is not None:
            raise _taken_id(asked.request_id, other)
        if existing is not None and not _is_same(existing.registered, registered):
            raise _taken_name(existing, registered)
        if existing is not None:
            return Taken(existing)
        store = job_store(spec)  # tried before the name is taken, which is for ever
        require_writable(store)
        warnings = warnings_of(store)
        if dry_run:
            return Taken(begin(registered), warnings)
        job = self._book.register(registered)
        if not _is_same(job.registered, registered):
            raise _taken_name(job, registered)
        return Taken(job, warnings)

    def stop(self, asked: Asked, name: JobName, intent: Intent = Intent.STOP) -> Job:
        """The job, which stops; or is suspended. Asked of one that is over already it changes nothing."""
        kind = EventType.STOP_REQUESTED if intent is Intent.STOP else EventType.SUSPEND_REQUESTED

        def decision(job: Job) -> Draft | None:
            if self._is_known(asked, job, kind) or job.intent is intent:
                return None
            if state_after(job, kind) is None:
                raise FailedPrecondition(
                    str(name), value=str(job.state), expected="a job that is not over", remedy="nothing is to be done"
                )
            return Draft(Record(kind, job.attempt, job.step), asked.actor, asked.request_id)

        return self._changed(asked, name, decision)

    def checkpoint(self, asked: Asked, name: JobName) -> Job:
        """The job, which takes a checkpoint at its next step boundary."""
        kind = EventType.CHECKPOINT_REQUESTED

        def decision(job: Job) -> Draft | None:
            if self._is_known(asked, job, kind):
                return None
            if job.state not in ON_NODES:
                raise FailedPrecondition(
                    str(name), value=str(job.state), expected="a job that runs", remedy="wait until it does"
                )
            return Draft(Record(kind, job.attempt, job.step), asked.actor, asked.request_id)

        return self._changed(asked, name, decision)

    def resume(self, asked: Asked, name: JobName, overrides: Sequence[str]) -> Job:
        """The job, which goes on from its newest checkpoint, with other placement or free keys where wanted. Raises
        Problems that name each key that can't change on resume, PhalanxError where no step is left.
        """
        kind = EventType.RESUMED

        def decision(job: Job) -> Draft | None:
            if self._is_known(asked, job, kind):
                return None
            if job.state not in RESUMABLE:
                raise FailedPrecondition(
                    str(name),
                    value=str(job.state),
                    expected="a suspended, stopped or failed job",
                    remedy="fork it, with more training.steps" if job.state is JobState.SUCCEEDED else "stop it first",
                )
            before = parse_job(job.spec)
            after = checked_spec(parse_job(apply_overrides(dict(job.spec), overrides), check_world=True))
            require_resumable(before, after)
            if job.checkpoint is not None:
                _require_steps_left(after, job.checkpoint, "the job goes on from", "raise it")
                if after.checkpoint.partial != before.checkpoint.partial:
                    require_known(before, after, self._book.store(name), job.checkpoint)
            record = Record(kind, job.attempt, job.step, message=", ".join(overrides), data={"spec": plain(after)})
            return Draft(record, asked.actor, asked.request_id)

        return self._changed(asked, name, decision)

    def _changed(self, asked: Asked, name: JobName, decision: Any) -> Job:
        check_request_id(asked.request_id, is_needed=True)
        return self._book.change(name, decision)

    @staticmethod
    def _is_known(asked: Asked, job: Job, kind: EventType) -> bool:
        """Whether this very request was carried out; raises AlreadyExists and FailedPrecondition."""
        known = job.requests.get(asked.request_id)
        if known is not None and known is not kind:
            raise AlreadyExists(
                "request_id", value=asked.request_id, expected="a fresh one", remedy="it asked for something else"
            )
        if known is None and asked.expected_revision not in (0, job.revision):
            raise FailedPrecondition(
                "expected_revision",
                value=asked.expected_revision,
                expected=f"the job's revision {job.revision}",
                remedy="read the job again, and decide anew",
            )
        return known is not None


def checked_spec(spec: Spec) -> Spec:
    """The job itself; raises PhalanxError for a URL that means another folder in each process, and where no layout can
    be chosen for it.
    """
    urls = {"job.storage": spec.job.storage, "data.held_out": spec.data.held_out or ""}
    urls |= {spec.data.url_key(name): source.url for name, source in spec.data.training.items()}
    for key, url in urls.items():
        if url.startswith(("file://./", "file://../", "file://~", "memory:")):
            raise PhalanxError(
                key,
                value=url,
                expected="storage that every node and service reaches under the same URL",
                remedy="write the whole path (file:///...), or name a bucket (s3://...)",
            )
    with_layout(spec, spec.cluster.world_size)
    return spec


def check_request_id(request_id: str, *, is_needed: bool) -> None:
    """Raises PhalanxError for what can't be a request id."""
    if is_needed and not (0 < len(request_id) <= _MAX_REQUEST_ID and request_id.isprintable()):
        raise PhalanxError(
            "request_id",
            value=request_id[:_MAX_REQUEST_ID],
            expected=f"from 1 to {_MAX_REQUEST_ID} printable characters",
            remedy="choose a fresh one for each request, such as a UUID",
        )


def resolve(lineage: Lineage, selector: str) -> CheckpointRef:
    """The checkpoint that `latest`, a step or `a<A>-s<step>` names. Raises NotFound."""
    live = lineage.checkpoints()
    match = _SELECTOR.fullmatch(selector)
    attempt, step = (numbered(match[1]), numbered(match[2])) if match else (None, numbered(selector))
    if selector in ("", "latest"):
        found = live[-1:]
    elif step is None or (match and attempt is None):
        expected = f"latest, a step, or a<attempt>-s<step>, each number of up to {MOST_DIGITS} digits"
        raise PhalanxError("checkpoint", value=selector, expected=expected, remedy="correct it")
    else:
        found = tuple(ref for ref in live if ref.step == step and attempt in (None, ref.attempt))
    if not found:
        there = ", ".join(f"a{ref.attempt}-s{ref.step}" for ref in live[-10:]) or "none"
        raise NotFound(
            "checkpoint", value=selector or "latest", expected=f"a checkpoint of the job ({there})", remedy="choose one"
        )
    return found[-1]


def _require_steps_left(spec: Spec, ref: CheckpointRef, use: str, remedy: str) -> None:
    """Raises PhalanxError where the checkpoint is already at the job's end. use: what starts from it."""
    if spec.training.steps <= ref.step:
        raise PhalanxError(
            "training.steps",
            value=spec.training.steps,
            expected=f"more than the {ref.step} steps of the checkpoint that {use}",
            remedy=remedy,
        )


def _is_same(there: RegisteredJob, given: RegisteredJob) -> bool:
    return (there.request_id, dict(there.spec), there.origin) == (given.request_id, dict(given.spec), given.origin)


def _taken_name(there: Job, given: RegisteredJob) -> AlreadyExists:
    same_id = there.registered.request_id == given.request_id
    return AlreadyExists(
        "request_id" if same_id else "job.name",
        value=given.request_id if same_id else given.uid,
        expected="a fresh id, as it was used for another job file"
        if same_id
        else f"a name that no job of project {given.project} has; that one is {there.state}",
        remedy="use another id" if same_id else "resume that job, or choose another [job] name",
    )


def _taken_id(request_id: str, other: Job) -> AlreadyExists:
    return AlreadyExists(
        "request_id", value=request_id, expected=f"a fresh id, as {other.name} was submitted with it", remedy="use one"
    )


def _refuse_two_names(name: str, overrides: Sequence[str]) -> None:
    given = next((each.partition("=")[2].strip("\"' ") for each in overrides if each.startswith("job.name=")), name)
    if name and given != name:
        raise PhalanxError(
            "job.name", value=given, expected=f"the name {name!r} that was given apart, or none", remedy="give one name"
        )
