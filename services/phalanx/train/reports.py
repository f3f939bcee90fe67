"""What ranks report of checkpoints and damage, as events: pure."""

from __future__ import annotations

from phalanx.api.agent.v1 import record_pb2
from phalanx.lineage.events import Cause, EventType
from phalanx.train.book import Draft
from phalanx.train.decide import Record
from phalanx.train.states import Job


def commit_draft(attempt: int, step: int, job: Job) -> Draft | None:
    """The event of a checkpoint that ranks of `attempt` committed; None where it is known, or of another attempt."""
    known = job.checkpoint
    is_known = known is not None and (known.attempt, known.step) >= (attempt, step)
    is_new = attempt == job.attempt and not is_known
    return Draft(Record(EventType.COMMITTED, attempt, step)) if is_new else None


def damage_draft(record: record_pb2.Record, job: Job) -> Draft | None:
    """The event of a shard or a checkpoint that a rank found damaged; None where that was told in this attempt."""
    told = record.damaged
    request_id = f"damaged/{record.attempt}/{told.what}"
    if request_id in job.requests:
        return None
    kind = "bad_checkpoint" if told.what.startswith("attempt ") else "bad_shard"
    cause = Cause(kind, f"{told.what}: {told.why}", rank=record.rank)
    data = {"action": "notify", "first_step": 0, "last_step": 0}
    incident = Record(EventType.INCIDENT, job.attempt, cause=cause, message=cause.message, data=data)
    return Draft(incident, request_id=request_id)
