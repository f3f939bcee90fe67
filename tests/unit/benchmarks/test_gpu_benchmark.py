"""The benchmark for whoever has one GPU: what it makes of small memory, of little time, and of wrong arguments."""

from __future__ import annotations

import argparse
import sys

import gpu
import pytest
from sides import TookTooLong, steps_of


@pytest.fixture
def bench(tmp_path):
    return gpu.Bench(argparse.Namespace(folder=tmp_path, device="cpu", windows=8, steps=8), peak_tflops=None)


def needing(most_windows):
    """A side whose memory is enough for so many windows."""

    def measure(trial):
        if trial.windows > most_windows:
            raise SystemExit("step 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        return trial.windows * 0.5

    return measure


def test_row_without_enough_memory_is_tried_with_half_the_windows_and_the_first_ones_windows_hold(bench, capsys):
    bench.row("phalanx", needing(2))
    bench.row("bare loop", needing(8))
    bench.row("eager", needing(1))
    assert [row["windows"] for row in bench.rows] == [2, 2, 1]
    assert [row["tokens_per_s"] for row in bench.rows] == [256, 256, 256]
    told = capsys.readouterr().out
    assert "phalanx: out of memory with 8 windows a step, 4 are tried" in told
    assert "eager: out of memory with 2 windows a step, 1 are tried" in told


def test_row_that_fails_otherwise_or_with_one_window_is_told_once_and_the_others_follow(bench, capsys):
    calls = []

    def broken(trial):
        calls.append(trial)
        raise SystemExit("no kernel for this GPU")

    bench.row("broken", broken)
    bench.row("large", needing(0))
    bench.row("phalanx", needing(8))
    assert len(calls) == 1
    assert [row.get("failed", "")[:9] for row in bench.rows] == ["no kernel", "step 1\nto", ""]
    assert "broken: failed\nno kernel" in capsys.readouterr().out


def test_row_behind_the_limit_is_left_out(bench, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LIMIT_S", gpu.SHORTEST_ROW_S - 1)
    bench.row("phalanx", needing(8))
    assert "step_s" not in bench.rows[0]
    assert "phalanx: left out, as 29 s for all rows were over" in capsys.readouterr().out


def test_ratio_is_of_tokens_a_second_and_says_where_windows_differ(capsys):
    rows = {"phalanx": {"tokens_per_s": 300.0, "windows": 4}, "bare loop": {"tokens_per_s": 200.0, "windows": 2}}
    assert gpu.tell_ratios(rows) == {"speed / bare loop": 1.5}
    assert capsys.readouterr().out == "speed / bare loop: 1.500 (of steps of 4 and 2 windows)\n"


def test_side_that_does_not_end_is_ended_with_what_it_started():
    # The second sleep holds the output open for as long as it lives.
    command = ["sh", "-c", "sleep 600 & echo step 1; sleep 600"]
    with pytest.raises(TookTooLong, match="ended by the benchmark after 1 s\nstep 1"):
        list(steps_of(command, {}, "step ", limit_s=1.0))


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80"),
        ("NVIDIA H200", "H200-141"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-80"),  # the same printed peak
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_is_taken_for_the_gpu_that_torch_names_and_never_for_another(shown, name):
    found = gpu.gpu_kind(shown)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--windows", "0"], "--windows is 0: expected 1 or more"),
        (["--steps", "7"], "--steps is 7: expected 8 or more"),
        (["--peak-tflops", "0"], "--peak-tflops is 0.0: expected a positive number"),
        (["--json", "nowhere/rows.json"], "nowhere/rows.json: No such file or directory: expected"),
    ],
)
def test_wrong_argument_is_told_before_anything_is_measured(given, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--device", "cpu", *given])
    monkeypatch.setattr(gpu, "measure", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
