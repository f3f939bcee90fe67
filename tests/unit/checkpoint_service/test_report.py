"""What `phalanx checkpoint ls` tells of each checkpoint beside that it is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import checkpoints

from phalanx.checkpoint.pins import PinDecision, PinLog
from phalanx.checkpoint.place import find_job
from phalanx.checkpoint.report import checkpoint_rows, one_row, pins_of
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.promotions import promote
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectStore, StoreDenied, open_store
from phalanx.objects.faults import FaultyStore, fail_before, on
from phalanx.snapshot.commit import commit


def save(store: ObjectStore, ref: CheckpointRef, *, speculative: bool, loss: float) -> None:
    checkpoints.write_parts(store, ref)
    draft = replace(checkpoints.a_draft(ref), speculative=speculative, metrics={"loss": loss})
    commit(Lineage(store), store, draft, 1, 30)


@pytest.fixture
def job(tmp_path: Path) -> ObjectStore:
    """Regular 10 (pinned), speculative 15 (promoted) and 17."""
    root = open_store(f"file://{tmp_path}")
    store = open_store(f"file://{tmp_path}/projects/p/jobs/demo")
    attempt = checkpoints.open_attempt(store).number
    for step, speculative in ((10, False), (15, True), (17, True)):
        save(store, CheckpointRef(attempt, step), speculative=speculative, loss=20.0 - step)
    promote(store, CheckpointRef(attempt, 15), "100 healthy steps")
    decision = PinDecision(1, "pin", attempt, 10, "the paper", "r", "me")
    assert PinLog(root).create(JobName("p", "demo"), decision)
    return store


def test_rows_tell_state_pins_and_metrics(job: ObjectStore) -> None:
    rows = checkpoint_rows(job, dead=False, pins=pins_of(find_job(job.url)))
    assert [(row.step, row.state, row.metrics["loss"]) for row in rows] == [
        (10, "live, pinned: the paper", 10.0),
        (15, "live, promoted", 5.0),
        (17, "live, speculative", 3.0),
    ]
    place = find_job(job.url)
    for row in rows:
        manifest = place.lineage.manifest(CheckpointRef(row.attempt, row.step))
        assert one_row(place.lineage, job, manifest, pins_of(place)) == row


def test_rows_where_the_cluster_may_not_be_read_come_without_pins(
    job: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = find_job(job.url)
    denied = StoreDenied("registry", expected="a right to list", remedy="ask for it")
    monkeypatch.setattr(
        "phalanx.checkpoint.place.open_store",
        lambda url: FaultyStore(open_store(url), [fail_before(on("list"), denied)]),
    )
    assert pins_of(place) == {} and "pins are not shown" in caplog.text
