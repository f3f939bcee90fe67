"""Real sinks, read back: JSON lines, TensorBoard, W&B offline; restarts and kills in between."""

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.telemetry import Metrics
from phalanx.telemetry.jsonl import JsonLines
from phalanx.telemetry.tensorboard import TensorBoard, newest_step
from phalanx.telemetry.wandb import HighWater


def scalars(folder):
    """{tag: [(step, value)]} as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def log_steps(metrics, steps):
    with metrics:
        for step in steps:
            metrics.log(step, {"train/loss": 10.0 - step, "speed/mfu": 0.5})


def test_jsonl_rows_are_read_back_and_replays_left_out(tmp_path):
    for steps in ([1, 2, 3, 4], [3, 4, 5]):
        log_steps(Metrics.of_run(tmp_path, "job", {}), steps)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0] == {"step": 1, "train/loss": 9.0, "speed/mfu": 0.5}


def test_jsonl_half_line_of_a_killed_process_is_cut_off(tmp_path):
    log_steps(Metrics.of_run(tmp_path, "job", {}), [1, 2])
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step":3,"train/lo')
    sink = JsonLines(tmp_path)
    assert sink.open("job", {}) == 2
    sink.log(3, {"train/loss": float("nan")})
    sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][2] == {"step": 3, "train/loss": None}


def test_jsonl_only_a_half_line_is_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":3')
    assert JsonLines(tmp_path).open("job", {}) == -1


def test_tensorboard_scalars_are_read_back_and_replays_left_out(tmp_path):
    for steps in ([1, 2, 3, 4], [3, 4, 5, 6]):
        log_steps(Metrics.of_run(tmp_path, "job", {"lr": 1e-3}, enable_tensorboard=True), steps)
    read = scalars(tmp_path / "tensorboard")
    assert read["train/loss"] == [(step, 10.0 - step) for step in range(1, 7)]
    assert set(read) == {"train/loss", "speed/mfu"}


def test_tensorboard_truncated_file_of_a_killed_process_is_read_to_its_last_record(tmp_path):
    log_steps(Metrics.of_run(tmp_path, "job", {}, enable_tensorboard=True), [1, 2, 3])
    (path,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(path, path.stat().st_size - 7)
    assert newest_step(tmp_path / "tensorboard") == 2
    sink = TensorBoard(tmp_path)
    assert sink.open("job", {}) == 2
    sink.log(3, {"train/loss": 7.0})
    sink.close()
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 9.0), (2, 8.0), (3, 7.0)]


def test_tensorboard_works_without_torch(tmp_path):
    code = """
        import sys
        sys.modules["torch"] = None
        from pathlib import Path
        from phalanx.telemetry import Metrics
        with Metrics.of_run(Path(sys.argv[1]), "job", {}, enable_tensorboard=True) as metrics:
            metrics.log(1, {"train/loss": 1.5})
            assert metrics.flush(60.0)
    """
    run_python(code, tmp_path)
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.5)]


def test_metrics_without_wandb_does_not_import_it(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from phalanx.telemetry import Metrics
        with Metrics.of_run(Path(sys.argv[1]), "job", {}) as metrics:
            metrics.log(1, {"train/loss": 1.5})
        assert not {"wandb", "tensorboard", "torch"} & set(sys.modules)
    """
    run_python(code, tmp_path)


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_metrics_missing_library_is_a_user_error_that_names_the_extra(tmp_path, monkeypatch, library):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PhalanxError, match=rf"phalanx\[{library}\]"):
        Metrics.of_run(tmp_path, "job", {}, **{f"enable_{library}": True})


def test_wandb_offline_run_is_written_and_continued_without_replays(tmp_path):
    code = """
        import sys, os
        from pathlib import Path
        from phalanx.telemetry import Metrics
        metrics = Metrics.of_run(Path(sys.argv[1]), "job-7", {"lr": 0.5}, enable_wandb=True)
        for step in map(int, sys.argv[2].split(",")):
            metrics.log(step, {"train/loss": 100.0 + step})
        counts = metrics.close()["wandb"]
        assert not counts.failure, counts
        print(counts.logged, counts.replayed)
    """
    environ = {"WANDB_MODE": "offline"}
    assert run_python(code, tmp_path, "1,2,3", **environ).split() == ["3", "0"]
    assert run_python(code, tmp_path, "2,3,4,5", **environ).split() == ["2", "2"]
    files = sorted((tmp_path / "wandb").glob("offline-run-*-job-7/run-job-7.wandb"))
    assert len(files) == 2
    assert [wandb_steps(path) for path in files] == [[1, 2, 3], [4, 5]]
    assert json.loads((tmp_path / "wandb-step.json").read_text()) == {"run": "job-7", "step": 5}


def test_wandb_disabled_mode_is_honoured(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from phalanx.telemetry import Metrics
        metrics = Metrics.of_run(Path(sys.argv[1]), "job-7", {}, enable_wandb=True)
        metrics.log(1, {"train/loss": 1.0})
        counts = metrics.close()["wandb"]
        assert not counts.failure, counts
    """
    run_python(code, tmp_path, WANDB_MODE="disabled")
    assert not list(tmp_path.glob("wandb/*run*"))


def test_high_water_is_replaced_as_a_whole(tmp_path):
    water = HighWater(tmp_path / "w.json")
    assert water.read("job") == -1
    water.write("job", 7)
    assert (water.read("job"), water.read("another")) == (7, -1)
    assert [path.name for path in tmp_path.iterdir()] == ["w.json"]


def test_high_water_file_that_is_not_ours_is_an_error(tmp_path):
    (tmp_path / "w.json").write_text("{}")
    with pytest.raises(OutsideError, match=r"w\.json"):
        HighWater(tmp_path / "w.json").read("job")


def test_sinks_of_a_killed_process_have_no_step_twice_and_no_gap(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from phalanx.telemetry import Metrics
        metrics = Metrics.of_run(Path(sys.argv[1]), "job", {}, enable_tensorboard=True)
        first, last = map(int, sys.argv[2].split(","))
        for step in range(first, last):
            metrics.log(step, {"train/loss": float(step)})
            if step == first + 200:
                metrics.flush(60.0)
        if len(sys.argv) > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        metrics.close()
    """
    assert start_python(code, tmp_path, "1,900", "kill").wait(60) == -signal.SIGKILL
    assert start_python(code, tmp_path, "1,1000").wait(60) == 0
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 1000))
    assert [step for step, _ in all_scalars(tmp_path / "tensorboard")] == list(range(1, 1000))


def all_scalars(folder):
    """Every scalar record of every file, nothing thinned out."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = [event for path in sorted(folder.iterdir()) for event in LegacyEventFileLoader(str(path)).Load()]
    return [
        (event.step, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.WhichOneof("value") == "simple_value"
    ]


def wandb_steps(path):
    """The steps of the history records in a .wandb file: a 7-byte header, then records framed as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, steps, whole = path.read_bytes(), 7, [], b""
    assert len(data) < 1 << 15, "more than one block: its padding is not handled here"
    while at + 7 <= len(data):
        num_bytes, piece = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + num_bytes]
        at += 7 + num_bytes
        if piece in (1, 4):  # a full record, or the last piece of one
            record = Record.FromString(whole)
            whole = b""
            steps += [record.history.step.num] if record.WhichOneof("record_type") == "history" else []
    return steps


def start_python(code, *arguments, **environ):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path("/")
    )


def run_python(code, *arguments, **environ):
    process = start_python(code, *arguments, **environ)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    return stdout
