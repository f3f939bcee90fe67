"""What the monitor makes of experts, of a job's own metrics, and of float16's overflows; records of other versions."""

from __future__ import annotations

import json
import math
import zlib

import numpy as np
import pytest
import sqlalchemy as sa

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.expert_load import ExpertHeat, ExpertLoad
from phalanx.core.step_parts import Part
from phalanx.lineage import StepRows
from phalanx.monitor.curve import LATER, ROW, pieces_of, rows_from, rows_of
from phalanx.monitor.metrics import MonitorCollector
from phalanx.monitor.refill import step_rows
from phalanx.monitor.testing import Told, started, steps, tell_run
from phalanx.monitor.web.plain_json import plain

JOB = "projects/p/jobs/experts"
LOAD = ExpertLoad(2.5, 1.25, 0.125, 0.0625)
COUNTS = np.array([[4, 0, 2, 2], [1, 3, 0, 4]])


def told_experts(monitor, num_steps=3):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, [told.progress(step, 2.0, experts=LOAD) for step in range(1, num_steps + 1)])
    return told


def series(monitor):
    collector = MonitorCollector(monitor.board, monitor.gpus, {})
    samples = [sample for family in collector.collect() for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_load_of_experts_is_in_curve_summary_and_figures(monitor):
    told_experts(monitor)
    run = monitor.view.get_run(JOB)
    assert list(run.curve.expert_worst) == [2.5] * 3 and list(run.curve.balance_loss) == [0.0625] * 3
    assert len(run.curve.loss_scale) == 0, "a column that says nothing is left out"
    summary = run.summary.expert_load
    assert (summary.worst, summary.mean, summary.idle, summary.balance_loss) == (2.5, 1.25, 0.125, 0.0625)
    found = series(monitor)
    assert found["phalanx_run_expert_worst", JOB] == 2.5 and found["phalanx_run_balance_loss", JOB] == 0.0625


def test_run_without_experts_says_nothing_of_them(monitor):
    told = Told(JOB)
    tell_run(monitor.board, [*started(told), *steps(told, 1, 3)])
    run = monitor.view.get_run(JOB)
    assert not run.summary.HasField("expert_load") and not run.HasField("expert_heat")
    assert not any(len(getattr(run.curve, name)) for name in LATER)
    assert not [name for name, *_ in series(monitor) if "expert" in name or "balance" in name]


def test_picture_of_all_experts_comes_once_to_a_watcher_and_outlives_a_kill(monitor):
    told = told_experts(monitor)
    tell_run(monitor.board, [told.heat(3, COUNTS)])
    run = monitor.view.get_run(JOB)
    heat = run.expert_heat
    assert ExpertHeat(heat.num_layers, heat.num_experts, heat.experts_per_cell, heat.load) == ExpertHeat.of(COUNTS)
    tell_run(monitor.board, [told.progress(4, 2.0, experts=LOAD)])
    assert not next(monitor.view.watch_run(JOB, run.version)).HasField("expert_heat"), "nothing new of it"
    tell_run(monitor.board, [told.heat(4, COUNTS.T)])
    assert next(monitor.view.watch_run(JOB, run.version)).expert_heat.step == 4
    monitor.board.save()
    again = monitor.again().view.get_run(JOB)
    assert again.expert_heat.num_layers == 4 and list(again.curve.expert_idle) == [0.125] * 4


def test_own_metrics_of_an_evaluation_are_kept_also_one_that_is_not_finite(monitor):
    told = told_experts(monitor)
    metrics = {"accuracy": 0.5, "odd": math.nan, "far": math.inf}
    tell_run(monitor.board, [told.record(evaluation=record_pb.Evaluation(step=3, loss=2.0, metrics=metrics))])
    monitor.board.save()
    for each in (monitor, monitor.again()):
        (point,) = each.view.get_run(JOB).evaluations
        assert point.metrics["accuracy"] == 0.5 and not math.isfinite(point.metrics["odd"])
        assert json.loads(json.dumps(plain(point), allow_nan=False))["metrics"] == {
            "accuracy": 0.5,
            "odd": None,
            "far": None,
        }
        assert series(each)["phalanx_run_evaluation_metric", JOB, "accuracy"] == 0.5


def test_own_metrics_of_a_foreign_agent_are_bounded(monitor):
    told = told_experts(monitor)
    metrics = {f"m{number:03}": 1.0 for number in range(500)}
    tell_run(monitor.board, [told.record(evaluation=record_pb.Evaluation(step=3, loss=2.0, metrics=metrics))])
    (point,) = monitor.view.get_run(JOB).evaluations
    assert sorted(point.metrics) == [f"m{number:03}" for number in range(16)]


def test_overflow_of_float16_is_no_incident_and_its_step_is_there(monitor):
    told = Told(JOB)
    scales = [65536.0 / 2**step for step in range(12)]
    overflows = [
        told.record(overflow=record_pb.Overflow(step=step, loss=3.0, loss_scale=scale))
        for step, scale in enumerate(scales, 1)
    ]
    tell_run(monitor.board, [*started(told), *overflows, told.progress(13, 2.5, loss_scale=16.0)])
    run = monitor.view.get_run(JOB)
    assert list(run.curve.step) == list(range(1, 14)) and list(run.curve.loss) == [3.0] * 12 + [2.5]
    assert list(run.curve.loss_scale) == [*scales, 16.0] and run.summary.loss_scale == 16.0
    assert all(math.isnan(norm) for norm in run.curve.gradient_norm[:12])
    assert not run.incidents
    monitor.board.save()
    monitor.again()
    tell_run(monitor.board, [told.record(non_finite=record_pb.NonFinite(step=14, loss="nan", gradient_norm="nan"))])
    (incident,) = monitor.view.get_run(JOB).incidents
    assert incident.cause.message == "loss or gradient is not finite", "the first one: overflows don't count in the row"


def test_overflow_alone_has_a_summary_that_a_database_takes(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    tell_run(monitor.board, [told.record(overflow=record_pb.Overflow(step=1, loss=3.0, loss_scale=8.0))])
    monitor.board.save()
    assert monitor.again().view.get_run(JOB).summary.loss == 3.0


def test_steps_filled_from_storage_have_the_load_of_experts_and_the_scale(monitor):
    nothing = np.full(2, np.nan)
    rows = StepRows(
        np.array([1, 2]), np.array([3.0, 2.5]), np.array([np.inf, 1.0]), np.array([8, 8]), np.ones(2),
        *[nothing] * len(Part), expert_worst=np.array([2.0, 1.5]), loss_scale=np.array([8.0, 4.0]),
    )  # fmt: skip
    monitor.board.fill(JOB, step_rows(rows, 1))
    curve = monitor.view.get_run(JOB).curve
    assert list(curve.expert_worst) == [2.0, 1.5] and list(curve.loss_scale) == [8.0, 4.0]
    assert len(curve.balance_loss) == 0


def test_pieces_of_the_version_before_are_read_with_the_later_columns_unknown():
    old = [name for name in ROW.names if name not in LATER]
    rows = rows_from({"step": np.arange(1, 7), "loss": np.linspace(3, 2, 6)}, 6)
    piece = zlib.compress(b"".join(np.ascontiguousarray(rows[name]).tobytes() for name in old), 1)
    read = rows_of([piece, *pieces_of(rows_from({"step": [7], "loss_scale": [8.0]}, 1)).values()])
    assert read["step"].tolist() == list(range(1, 8)) and read["loss"][:6].tolist() == rows["loss"].tolist()
    assert np.isnan(read["loss_scale"][:6]).all() and read["loss_scale"][6] == 8.0
    assert np.isnan(read["expert_worst"]).all()


def test_database_of_the_version_before_is_taken_on(monitor):
    """As it is after an upgrade: two fields an evaluation, no picture."""
    told = told_experts(monitor)
    tell_run(monitor.board, [told.record(evaluation=record_pb.Evaluation(step=3, loss=2.0)), told.heat(3, COUNTS)])
    monitor.board.save()
    engine = sa.create_engine(monitor.url)
    with engine.begin() as connection:
        (row,) = connection.execute(sa.text("SELECT evaluations FROM runs"))
        assert json.loads(row.evaluations) == [[3, 2.0]], "what yesterday's monitor reads, where there are no metrics"
        connection.execute(sa.text("UPDATE runs SET expert_heat = NULL"))
    engine.dispose()
    run = monitor.again().view.get_run(JOB)
    assert [point.loss for point in run.evaluations] == [2.0] and not run.HasField("expert_heat")


def _unknown(number: int, payload: bytes) -> bytes:
    """A field of a version to come: length-delimited, with a number that nobody has."""
    tag = number << 3 | 2
    head = bytearray()
    while tag > 127:
        head.append(tag & 127 | 128)
        tag >>= 7
    return bytes([*head, tag, len(payload)]) + payload


def test_record_of_an_agent_of_tomorrow_is_read_without_what_is_unknown(monitor):
    told = Told(JOB)
    tell_run(monitor.board, started(told))
    known = told.progress(1, 2.0, experts=LOAD)
    known.record.progress.MergeFromString(_unknown(200, b"figures to come"))
    wire = known.SerializeToString()
    assert b"figures to come" in wire
    event = told.record()
    event.record.MergeFromString(_unknown(300, b"a kind to come"))
    tell_run(monitor.board, map(train_pb.WatchRecordsResponse.FromString, (wire, event.SerializeToString())))
    run = monitor.view.get_run(JOB)
    assert list(run.curve.loss) == [2.0] and run.summary.expert_load.worst == 2.5 and not run.incidents


@pytest.mark.parametrize("message", [pb.RunSummary, pb.GetRunResponse, pb.WatchRunResponse])
def test_answer_of_a_monitor_of_yesterday_has_none_of_it(message):
    """Its answers lack the fields, and whoever asks finds them absent."""
    found = message.FromString(b"")
    names = {field.name for field, _ in found.ListFields()}
    assert not names & {"expert_load", "loss_scale", "expert_heat"}
    assert "expert_heat" not in plain(found) and "expert_load" not in plain(found)
