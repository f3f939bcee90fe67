"""What a trace says of computing and communication, on traces written by hand and one of torch's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.telemetry.trace import intersection, timeline, total, union


def _trace(*events: tuple[str, float, float], cat: str = "cpu_op") -> bytes:
    told: list[dict[str, Any]] = [
        {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": 1} for name, begin, end in events
    ]
    return json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *told]}).encode()


def test_share_of_communication_beside_computing_counts_each_moment_once() -> None:
    found = timeline(
        _trace(
            ("step 7", 0, 100),
            ("aten::linear", 10, 40),
            ("aten::mm", 20, 30),
            ("aten::mm", 60, 70),
            ("gloo:all_gather", 30, 60),
            ("gloo:all_reduce", 35, 50),
        )
    )
    assert found.computing == ((10, 40), (60, 70)) and found.communicating == ((30, 60),)
    assert found.beside_us == 10 and found.share_beside == pytest.approx(1 / 3)
    assert {kind: len(spans) for kind, spans in found.by_kind.items()} == {"gloo:all_gather": 1, "gloo:all_reduce": 1}


def test_only_what_lies_in_steps_counts() -> None:
    found = timeline(
        _trace(("step 1", 0, 10), ("step 2", 10, 20), ("aten::mm", 5, 15), ("aten::mm", 50, 60), ("gloo:send", 52, 58))
    )
    assert total(found.computing) == 10 and found.communicating == () and found.share_beside == 0
    assert found.num_steps == 2


def test_trace_without_steps_counts_whole() -> None:
    found = timeline(_trace(("aten::mm", 5, 15), ("gloo:send", 10, 20)))
    assert found.share_beside == 0.5 and found.num_steps == 0


def test_on_a_gpu_kernels_alone_count() -> None:
    kernels = json.loads(_trace(("ncclDevKernel_AllGather", 0, 10), ("gemm", 5, 30), cat="kernel"))["traceEvents"]
    host = json.loads(_trace(("step 1", 0, 100), ("aten::mm", 0, 1), ("nccl:all_gather", 0, 90)))["traceEvents"]
    found = timeline(json.dumps({"traceEvents": kernels + host}).encode())
    assert found.computing == ((5, 30),) and found.communicating == ((0, 10),) and found.share_beside == 0.5


def test_trace_of_torch_itself_is_read(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, record_function("step 1"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = timeline((tmp_path / "trace.json").read_bytes())
    assert len(found.steps) == 1 and 0 < total(found.computing) <= total(found.steps)
    assert found.communicating == ()


def test_union_joins_what_touches_and_intersection_takes_every_pair() -> None:
    assert union([(5, 6), (0, 2), (2, 3), (1, 4)]) == ((0, 4), (5, 6))
    assert intersection([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 20)]) == ((1, 2), (3, 4), (5, 6), (8, 9))
    assert intersection([], [(0, 1)]) == ()
