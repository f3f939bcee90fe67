"""An agent and a monitor of different versions: what the contract's baseline, the version before, reads of today's
records, and what today's monitor makes of the baseline's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import Message

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.expert_load import ExpertLoad
from phalanx.monitor.testing import Told, run_with_recovery, started, tell_run

JOB = "projects/p/jobs/versions"
BASELINE = Path(__file__).parents[3] / "proto/baseline.json"


@pytest.fixture(scope="module")
def before() -> Callable[[str], Any]:
    """Message classes of the baseline by their full names."""
    image = json.loads(BASELINE.read_text())
    files = descriptor_pb2.FileDescriptorSet()
    json_format.ParseDict({"file": image["file"]}, files, ignore_unknown_fields=True)
    pool = descriptor_pool.DescriptorPool()
    left = list(files.file)
    while left:
        ready = [each for each in left if not {*each.dependency} & {other.name for other in left}]
        assert ready, "imports in a circle"
        for each in ready:
            pool.Add(each)
            left.remove(each)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def events(told: Told) -> list[train_pb.WatchRecordsResponse]:
    """What an agent of today may say, of each new kind."""
    load = ExpertLoad(2.0, 1.5, 0.25, 0.01)
    metrics = {"accuracy": 0.5, "odd": math.nan}
    return [
        told.progress(1, 2.0, experts=load, loss_scale=8.0),
        told.heat(1, np.array([[1, 3]])),
        told.record(overflow=record_pb.Overflow(step=2, loss=2.0, loss_scale=8.0)),
        told.record(evaluation=record_pb.Evaluation(step=2, loss=2.5, metrics=metrics)),
    ]


def test_monitor_of_the_version_before_reads_an_agent_of_today(before: Callable[[str], Any]) -> None:
    old = before("phalanx.api.train.v1.WatchRecordsResponse")
    read = [old.FromString(each.SerializeToString()) for each in events(Told(JOB))]
    assert [each.record.WhichOneof("event") for each in read] == ["progress", None, None, "evaluation"]
    progress = read[0].record.progress
    assert (progress.step, progress.loss, progress.gradient_norm, progress.tokens) == (1, 2.0, 1.0, 65536)
    assert not hasattr(progress, "experts") and read[3].record.evaluation.loss == 2.5
    assert [each.number for each in read] == [1, 2, 3, 4], "it counts what it does not understand, and misses nothing"


def test_train_of_the_version_before_hands_on_what_it_does_not_know(before: Callable[[str], Any]) -> None:
    old = before("phalanx.api.train.v1.WatchRecordsResponse")
    for each in events(Told(JOB)):
        again = train_pb.WatchRecordsResponse.FromString(old.FromString(each.SerializeToString()).SerializeToString())
        assert again.record.WhichOneof("event") == each.record.WhichOneof("event")
        assert again.SerializeToString(deterministic=True) == each.SerializeToString(deterministic=True)


def test_monitor_of_today_reads_an_agent_of_the_version_before(monitor: Any, before: Callable[[str], Any]) -> None:
    old = before("phalanx.api.train.v1.WatchRecordsResponse")

    def as_before(told: Message) -> train_pb.WatchRecordsResponse:
        message = old.FromString(told.SerializeToString())
        message.DiscardUnknownFields()
        return train_pb.WatchRecordsResponse.FromString(message.SerializeToString())

    told = Told(JOB)
    tell_run(monitor.board, map(as_before, [*started(told), *events(told)]))
    run = monitor.view.get_run(JOB)
    assert list(run.curve.loss) == [2.0] and not len(run.curve.expert_worst) and not run.HasField("expert_heat")
    assert [(point.step, point.loss, dict(point.metrics)) for point in run.evaluations] == [(2, 2.5, {})]
    tell_run(monitor.board, map(as_before, run_with_recovery(f"{JOB}-2", 50)))
    assert list(monitor.view.get_run(f"{JOB}-2").curve.step) == list(range(1, 51))
