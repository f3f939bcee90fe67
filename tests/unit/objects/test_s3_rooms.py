"""What is built on stores, once on S3: a job's lineage, its records, and a checkpoint saved by one layout and restored
in another.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.core.digest import sha256
from phalanx.core.step_parts import Part
from phalanx.lineage import (
    Attempt,
    CheckpointRef,
    JobRecord,
    Lineage,
    LoaderState,
    Manifest,
    ObjectRef,
    StepRows,
    WindowRows,
)
from phalanx.objects import ObjectStore, open_store
from phalanx.snapshot import commit, load
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer

DIGEST = sha256(b"the same for all")
WORLD_SIZE, STEP, SEQ_LEN, DEADLINE_S = 2, 3, 8, 30


@pytest.fixture
def url(s3_prefix: str) -> str:
    """The root of a job."""
    return f"{s3_prefix}/projects/p/jobs/on-s3"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A weight of uneven rows, its optimizer state and a step count."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(5, 700, generator=generator)
    return {"model.weight": weight, "optim.weight.exp_avg": weight * 0.1, "optim.weight.step": torch.tensor(3.0)}


def open_next(lineage: Lineage) -> Attempt:
    return lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={"dp_shard": WORLD_SIZE})


def rows() -> tuple[WindowRows, StepRows]:
    """Two windows a step, of one segment each."""
    position = np.arange(2 * STEP, dtype=np.int64)
    step = np.arange(1, STEP + 1, dtype=np.int64)
    windows = WindowRows(
        step=position // 2 + 1,
        position=position,
        weight=np.ones(len(position), np.float32),
        xxh3=position.astype(np.uint64) + np.uint64(2**63),
        segment_window=position,
        shard=position * 0,
        member=position * 0,
        offset=position * SEQ_LEN,
        length=position * 0 + SEQ_LEN,
    )
    seconds = np.full(STEP, 0.25)
    return windows, StepRows(step, 4.0 / step, 0.5 / step, step * 0 + 2 * SEQ_LEN, seconds, *[seconds / 8] * len(Part))


def held_by(tensors: dict[str, torch.Tensor], rank: int) -> list[HeldTensor]:
    """Three rows on rank 0 and two on rank 1; the scalar on both."""
    held = []
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            held.append(HeldTensor(name, (), Box((), ()), tensor, rank, WORLD_SIZE))
        else:
            local = tensor[:3] if rank == 0 else tensor[3:]
            held.append(HeldTensor(name, tuple(tensor.shape), Box((3 * rank, 0), tuple(local.shape)), local))
    return held


def save(store: ObjectStore, attempt: Attempt, tensors: dict[str, torch.Tensor], records: ObjectRef) -> Manifest:
    """Two ranks save and one commits."""
    writers = [Writer(store, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    pending = [writer.save(attempt.number, STEP, held_by(tensors, rank)) for rank, writer in enumerate(writers)]
    expected = {rank: part.wait(DEADLINE_S) for rank, part in enumerate(pending)}
    draft = Manifest(
        attempt.number,
        STEP,
        WORLD_SIZE,
        DIGEST,
        DIGEST,
        DIGEST,
        attempt.journal_digest,
        LoaderState(STEP, 2 * STEP),
        {"lr": 0.1},
        (records,),
        (),
    )
    return commit(Lineage(store), store, draft, WORLD_SIZE, DEADLINE_S, expected=expected)


def test_job_on_s3_saved_by_two_ranks_is_restored_by_one_and_continued(
    url: str, tensors: dict[str, torch.Tensor]
) -> None:
    store = open_store(url, deadline_s=DEADLINE_S)
    lineage = Lineage(store)
    job = lineage.create_job(request_id="r", spec={"a": 1}, identity={"b": 2}, identity_digest=DIGEST)
    attempt = open_next(lineage)
    lineage.append_journal(attempt.number, "batch_size", 4, {"windows": 2})
    records = lineage.records.put(attempt.number, 0, 1, STEP, *rows())
    written = save(store, attempt, tensors, records)

    again = open_store(url, deadline_s=DEADLINE_S)  # as another process finds it
    found = Lineage(again)
    ref = CheckpointRef(1, STEP)
    assert isinstance(job, JobRecord) and found.read_job() == job
    assert found.checkpoints() == (ref,)
    assert found.manifest(ref) == written
    (windows, steps), *others = found.records.live()
    assert others == []
    assert windows.position.tolist() == rows()[0].position.tolist()
    assert steps.loss.tolist() == rows()[1].loss.tolist()

    restored = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    held = [HeldTensor(name, tuple(each.shape), whole(tuple(each.shape)), each) for name, each in restored.items()]
    assert restore(again, written, held).num_tensors == len(tensors)
    loaded = load(url)
    for name, tensor in tensors.items():
        assert torch.equal(restored[name], tensor)
        assert np.array_equal(loaded[name], tensor.numpy())

    child = open_next(found)
    assert (child.number, child.parent) == (2, ref)
    assert [entry.kind for entry in found.journal(2)] == ["batch_size"]
    assert list(again.children()) == ["a00000001/", "attempts/", "job.json", "journal/"]
    assert list(again.children("a00000001/s")) == ["a00000001/s00000003/"]
