"""The tracer of a job: its sources and orders by the job file, its beginning and journal by its lineage."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.left_out import left_out_by
from phalanx.data.tracing import Steps, TracedSource, Tracer
from phalanx.lineage import Lineage
from phalanx.spec import Job
from phalanx.trainer.mixing import JobReading
from phalanx.trainer.places import job_store, settings_at


@dataclass(frozen=True, slots=True)
class Trained:
    """Which attempt's training of a step counts (None: none yet has stored records of it), and which others trained it
    too, in vain.
    """

    attempt: int | None
    redone: tuple[int, ...]


def tracer_of(job: Job, *, shows: bool = False) -> Tracer:
    """The tracer of a job, started or not. shows: see `Tracer`. Raises PhalanxError where its data is not there."""
    lineage = Lineage(job_store(job))
    record = lineage.read_job()
    origin = record.origin if record is not None else None
    reading = JobReading.of(job, origin)
    sources = [
        TracedSource(each.name, each.store, each.split, each.order, settings_at(job, job.data.training[each.name].url))
        for each in reading.sources
    ]
    view = reading.view_of(left_out_by(lineage).plan)
    return Tracer(sources, Steps(job.training.global_batch_size, origin), view, shows=shows)


def trained(job: Job, step: int) -> Trained:
    """Who trained a step, by the records that attempts stored."""
    lineage = Lineage(job_store(job))
    live = next((link.attempt.number for link in lineage.chain() if link.has_step(step)), None)
    recorded = lineage.last_recorded_steps()
    firsts = {each.number: each.start_step + 1 for each in lineage.attempts()}
    did = tuple(number for number, last in recorded.items() if firsts[number] <= step <= last)
    return Trained(live if live in did else None, tuple(number for number in did if number != live))
