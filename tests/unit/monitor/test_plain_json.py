"""Messages as the page reads them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.monitor.web.plain_json import plain


def test_message_with_defaults_has_them_and_leaves_out_what_is_absent():
    said = plain(pb.RunSummary(job="j"))
    assert said["step"] == 0 and said["state"] == "unspecified"
    assert "loss" not in said
    assert plain(pb.RunSummary(loss=0.0))["loss"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_is_null(value):
    assert plain(pb.RunSummary(loss=value))["loss"] is None
    assert plain(pb.Curve(step=[1, 2], loss=[value, 1.5]))["loss"] == [None, 1.5]


def test_enum_is_its_word_and_one_of_the_future_its_number():
    assert plain(train_pb.JobEvent(type=train_pb.JOB_EVENT_TYPE_STOP_REQUESTED))["type"] == "stop_requested"
    assert plain(record_pb.Cause(kind=record_pb.CAUSE_KIND_NAN))["kind"] == "nan"
    assert plain(pb.RunSummary(state=99))["state"] == "99"  # type: ignore[arg-type]


def test_time_is_iso_8601_and_messages_nest():
    event = train_pb.JobEvent(revision=3, cause=record_pb.Cause(rank=0, message="m"))
    event.time.FromJsonString("2026-01-02T03:04:05.500Z")
    event.placement.add(node_id="n", ranks=[0, 1])
    said = plain(event)
    assert said["time"] == "2026-01-02T03:04:05.500Z"
    assert said["cause"]["rank"] == 0 and "exit_code" not in said["cause"]
    assert said["placement"] == [{"node_id": "n", "ranks": [0, 1]}]


@given(st.lists(st.floats()), st.text())
def test_any_message_is_strict_json(losses, text):
    message = pb.WatchRunResponse(curve=pb.Curve(loss=losses), incidents=[pb.Incident(outcome=text)])
    said = json.loads(json.dumps(plain(message), allow_nan=False))
    assert len(said["curve"]["loss"]) == len(losses)
    assert said["incidents"][0]["outcome"] == text
