"""A run over data that loses a shard: the journal takes its windows out, all ranks agree, the proof accounts for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.jobs import assert_proven, lineage_of, losses_of, run_here, write_job

from phalanx.data.damage import Finding, lost_windows, payload_of
from phalanx.data.decisions import Action
from phalanx.gang import ForkServer
from phalanx.spec import load_job
from phalanx.stream.manifest import open_split, tar_key
from phalanx.trainer.places import order_of, store_at

BATCH = 8


@pytest.mark.parametrize("object_", ["tar", "index"])
def test_run_whose_shard_is_lost_and_taken_out_ends_and_is_proved(
    corpus: str, server: ForkServer, tmp_path: Path, object_: str
) -> None:
    """Two ranks, each with windows of the shard or without: their counts of valid tokens must agree."""
    shutil.copytree(corpus.removeprefix("file://"), tmp_path / "data")
    path = write_job(tmp_path, (tmp_path / "data").as_uri(), steps=6)
    first = run_here(path, server, "training.steps=2", "lr_scheduler.total_steps=40")
    assert first.outcome is not None and first.outcome.ok
    job = load_job(path)
    store = store_at(job, job.data.train)
    split = open_split(store)
    order = order_of(job, store, split)
    shard = next(s for s in range(split.num_shards) if len(order.spans_of_shard(0, s)))
    key = tar_key(split.columns.names[shard])
    finding = Finding(key, shard, split.shard(shard).digest, (key,), object_ == "index", "a test")
    lost = lost_windows(order, finding, (0, 6 * BATCH))
    payload = payload_of(finding, Action.SKIP, (0, 6 * BATCH), lost)
    lineage_of(path).append_journal(1, "damage", lost[0][0], payload)
    (tmp_path / "data/train" / key).unlink()
    if object_ == "index":
        (tmp_path / "data/train" / key.replace(".tar", ".index.safetensors")).unlink()
    second = run_here(path, server)
    assert second.outcome is not None and second.outcome.ok, second.outcome
    proof = assert_proven(path, 6)
    assert proof.windows_left_out == sum(16 <= p < 48 for start, stop in lost for p in range(start, stop)) > 0
    assert set(losses_of(path)) == set(range(1, 7))
