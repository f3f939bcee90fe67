"""Rows between two checkpoints, and the objects that they become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx.core.digest import sha256
from phalanx.core.step_parts import Part, StepParts
from phalanx.lineage import Lineage
from phalanx.objects import open_store
from phalanx.stream.windows import ReadRows
from phalanx.trainer.recorder import Recorder, StepResult


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    """A job with one attempt."""
    made = Lineage(open_store(tmp_path.as_uri()))
    made.open_attempt(code_digest=sha256(b"code"), identity_digest=sha256(b"identity"), placement={})
    return made


def rows(*positions: int) -> ReadRows:
    """Windows of 8 tokens, one segment each."""
    n = len(positions)
    return ReadRows(
        position=np.array(positions, dtype=np.int64),
        weight=np.ones(n, dtype=np.float32),
        xxh3=np.arange(n, dtype=np.uint64),
        segment_window=np.arange(n, dtype=np.int64),
        shard=np.zeros(n, dtype=np.int64),
        member=np.zeros(n, dtype=np.int64),
        offset=np.array(positions, dtype=np.int64) * 8,
        length=np.full(n, 8, dtype=np.int64),
    )


def result(step: int, loss: float = 5.0) -> StepResult:
    """A step of one second."""
    return StepResult(step, loss, 1.0, 16, 1.0, StepParts.of({Part.DATA: 0.1, Part.REST: 0.9}))


def recorder(
    lineage: Lineage, rank: int = 0, start_step: int = 0, *, windows: bool = True, steps: bool = True
) -> Recorder:
    """Of attempt 1."""
    return Recorder(lineage, 1, rank, start_step, records_windows=windows, records_steps=steps)


def test_hand_over_stores_the_rows_of_its_steps_once_and_starts_anew(lineage: Lineage) -> None:
    taken = recorder(lineage)
    taken.add(result(1), rows(0, 1))
    taken.add(result(2, loss=float("nan")), rows(2, 3))
    store = taken.hand_over(2)
    taken.add(result(3), rows(4, 5))  # a step that goes on while the rows before it are stored
    (ref,) = store()
    windows, steps = lineage.records.read(ref)
    assert windows.position.tolist() == [0, 1, 2, 3] and windows.step.tolist() == [1, 1, 2, 2]
    assert windows.segment_window.tolist() == [0, 1, 2, 3] and windows.offset.tolist() == [0, 8, 16, 24]
    assert steps.step.tolist() == [1, 2] and np.isnan(steps.loss[1]) and steps.valid_tokens.tolist() == [16, 16]
    assert store() == (ref,)  # a repeated upload recognises its own
    (second,) = taken.hand_over(3)()
    assert second.key.endswith("s00000003-s00000003-r00000000.safetensors")
    assert lineage.records.read(second)[0].position.tolist() == [4, 5]


def test_rank_that_records_nothing_stores_nothing(lineage: Lineage) -> None:
    silent = recorder(lineage, rank=3, windows=False, steps=False)
    silent.add(result(1), rows(0))
    assert silent.hand_over(1)() == ()


def test_rank_that_reads_but_is_not_the_first_stores_windows_alone(lineage: Lineage) -> None:
    reader = recorder(lineage, rank=1, steps=False)
    reader.add(result(1), rows(7))
    (ref,) = reader.hand_over(1)()
    windows, steps = lineage.records.read(ref)
    assert windows.position.tolist() == [7] and len(steps.step) == 0


def test_rank_with_surplus_slots_only_stores_an_empty_object(lineage: Lineage) -> None:
    reader = recorder(lineage, rank=2, steps=False)
    reader.add(result(1), rows())
    (ref,) = reader.hand_over(1)()
    assert len(lineage.records.read(ref)[0].position) == 0


def test_hand_over_without_a_step_stores_nothing(lineage: Lineage) -> None:
    assert recorder(lineage, start_step=4).hand_over(4)() == ()
