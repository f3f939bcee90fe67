"""What ranks report, as events."""

from __future__ import annotations

import pytest
from train_values import after, event_of, running

from phalanx.api.agent.v1 import record_pb2
from phalanx.lineage.events import EventType
from phalanx.train.reports import commit_draft, damage_draft
from phalanx.train.states import fold


def test_commit_of_the_running_attempt_is_an_event_once() -> None:
    job = running()
    draft = commit_draft(1, 5, job)
    assert draft is not None and (draft.record.type, draft.record.step) == (EventType.COMMITTED, 5)
    job = after(job, draft.record)
    assert commit_draft(1, 5, job) is None and commit_draft(1, 3, job) is None
    assert commit_draft(1, 6, job) is not None


def test_commit_of_another_attempt_is_none() -> None:
    assert commit_draft(2, 5, running()) is None


@pytest.mark.parametrize(("what", "kind"), [("attempt 1 step 5", "bad_checkpoint"), ("train/000001", "bad_shard")])
def test_damage_is_an_incident_once_an_attempt(what: str, kind: str) -> None:
    job = running()
    record = record_pb2.Record(rank=3, attempt=1, damaged=record_pb2.Damaged(what=what, why="cut off"))
    draft = damage_draft(record, job)
    assert draft is not None and draft.record.cause is not None
    assert (draft.record.cause.kind, draft.record.cause.rank, draft.record.data["action"]) == (kind, 3, "notify")
    assert damage_draft(record, fold(job, event_of(job, draft.record, draft.request_id))) is None
    again = record_pb2.Record(rank=3, attempt=2, damaged=record.damaged)
    assert damage_draft(again, fold(job, event_of(job, draft.record, draft.request_id))) is not None
