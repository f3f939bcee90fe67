"""Where the time of a step goes, in the records of a gang that is slow on purpose: pipeline x fully sharded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.jobs import write_job

from phalanx.core.step_parts import Part
from phalanx.gang import Event, ForkServer, GangOrder
from phalanx.lineage import Lineage, StepRows
from phalanx.spec import load_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import prepare, to_arguments

pytestmark = pytest.mark.distributed
PATIENCE_S = 80.0
DATA_S, OPTIMIZER_S, CHECKPOINT_S, EVALUATION_S = 0.11, 0.13, 0.17, 0.19  # as slow_ranks has them
LAYOUT = "\n[validation]\nfreq = 3\nwindows = 8\n"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, corpus: str, server: ForkServer) -> tuple[StepRows, list[Event]]:
    """The step rows of a job of six steps, a save every second and an evaluation every third; what rank 0 told."""
    folder = Path(tmp_path_factory.mktemp("parts"))
    path = write_job(folder, corpus, steps=6, nproc=4, more=LAYOUT)
    job = load_job(path, ("parallel.pp=2", "parallel.dp_shard=2", "parallel.local_batch_size=2"))
    prepared = prepare(job, 4)
    arguments = to_arguments(prepared) | {"debug_rank": None}
    gang = server.start(GangOrder(4, "slow_ranks:run", folder / "logs", arguments, attempt=1))
    try:
        events = list(gang.events(PATIENCE_S))
        assert gang.over, gang.stacks(5.0)
    finally:
        outcome = gang.end(0.0)
    assert outcome.ok, outcome.first_cause
    rows = StepRows.concatenate([steps for _, steps in Lineage(job_store(job)).records.live()])
    order = np.argsort(rows.step)
    names = ("step", "loss", "gradient_norm", "valid_tokens", "step_time_s", *(part.value for part in Part))
    return StepRows(**{name: getattr(rows, name)[order] for name in names}), [e for e in events if e.rank == 0]


def test_parts_of_all_steps_sum_up_to_the_wall_time_of_training(measured: tuple[StepRows, list[Event]]) -> None:
    rows, events = measured
    (wall_s,) = (event.fields["wall_s"] for event in events if event.kind == "measured")
    assert rows.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert sum(getattr(rows, part).sum() for part in Part) == pytest.approx(wall_s, rel=0.02)
    assert all((getattr(rows, part) >= 0).all() for part in Part)


def test_what_is_slow_lands_in_its_own_part(measured: tuple[StepRows, list[Event]]) -> None:
    rows, _ = measured
    assert (rows.data_wait_s >= DATA_S).all()
    assert (rows.optimizer_s >= OPTIMIZER_S).all()
    assert [step for step, s in zip(rows.step, rows.checkpoint_s, strict=True) if s >= CHECKPOINT_S] == [3, 5]
    assert [step for step, s in zip(rows.step, rows.evaluation_s, strict=True) if s > 0.9 * EVALUATION_S] == [4]
    others = rows.forward_s + rows.backward_s + rows.rest_s
    assert np.median(others) < DATA_S + OPTIMIZER_S


def test_every_step_has_forward_backward_and_communication(measured: tuple[StepRows, list[Event]]) -> None:
    rows, _ = measured
    assert all((getattr(rows, part) > 0).all() for part in (Part.FORWARD, Part.BACKWARD, Part.COMMUNICATION))


def test_progress_tells_the_parts_that_the_record_holds(measured: tuple[StepRows, list[Event]]) -> None:
    rows, events = measured
    told = {event.fields["step"]: event.fields["parts"] for event in events if event.kind == "progress"}
    assert told[4] == {part.value: getattr(rows, part)[3] for part in Part}
