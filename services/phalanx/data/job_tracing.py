"""The tracer of a job: its sources and orders by the job file, its beginning and journal by its lineage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.data.left_out import left_out_by
from phalanx.data.tracing import OnTraced, Steps, TracedSource, Tracer
from phalanx.lineage import JobRecord, Lineage
from phalanx.lineage.job import require_same_identity
from phalanx.spec import Job
from phalanx.trainer.mixing import JobReading
from phalanx.trainer.places import job_store, settings_at
from phalanx.trainer.preflight import identity_of


@dataclass(frozen=True, slots=True)
class Trained:
    """Which attempt's training of a step counts (None: none yet has stored records of it), and which others trained it
    too, in vain.
    """

    attempt: int | None
    redone: tuple[int, ...]


def tracer_of(job: Job, *, shows: bool = False, told: OnTraced | None = None) -> Tracer:
    """The tracer of a job, started or not. shows, told: see `Tracer`. Raises PhalanxError where its data is not there,
    or the job that was started is another one.
    """
    lineage = Lineage(job_store(job))
    record = lineage.read_job()
    reading = reading_of(job, record)
    sources = [
        TracedSource(each.name, each.store, each.split, each.order, settings_at(job, job.data.training[each.name].url))
        for each in reading.sources
    ]
    view = reading.view_of(left_out_by(lineage).plan)
    steps = Steps(job.training.global_batch_size, reading.origin, job.training.steps)
    return Tracer(sources, steps, view, shows=shows, told=told)


def reading_of(job: Job, record: JobRecord | None) -> JobReading:
    """What a job reads. record: of the job as it was created, None where it never was: raises PhalanxError, naming the
    keys that differ, where that has another identity than `job`.
    """
    reading = JobReading.of(job, None if record is None else record.origin)
    if record is not None:
        splits = {source.name: source.split for source in reading.sources}
        digest = job.identity_digest({name: split.digest for name, split in splits.items()})
        given = replace(record, identity=identity_of(job, splits), identity_digest=digest)
        require_same_identity(record, given, job_store(job).url)
    return reading


def trained(job: Job, step: int) -> Trained:
    """Who trained a step, by the records that attempts stored."""
    lineage = Lineage(job_store(job))
    live = next((link.attempt.number for link in lineage.chain() if link.has_step(step)), None)
    recorded = lineage.records.last_steps()
    firsts = {each.number: each.start_step + 1 for each in lineage.attempts()}
    did = tuple(number for number, last in recorded.items() if firsts[number] <= step <= last)
    return Trained(live if live in did else None, tuple(number for number in did if number != live))
