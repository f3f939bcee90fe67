"""A tokenizer is trained by a process of its own: the same bytes, and it ends with whoever waits for it, however that
ends.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from corpus_builders import WORDS

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare import training
from phalanx.data.prepare.tokenizer import train_tokenizer
from phalanx.data.prepare.training import train_apart

DEADLINE_S = 60.0
ENDS_WITHIN_S = 5.0  # about one on a machine that is not busy; the trainings here take much longer
TEXTS = [" ".join(WORDS[number % len(WORDS)] for number in range(n, n + 40)).encode() for n in range(300)]
SLOW = """
import sys
import numpy
from phalanx.data.prepare.training import train_apart
chance = numpy.random.default_rng(0)
def texts():
    for _ in range(60_000):
        yield chance.integers(97, 123, 300, dtype="u1").tobytes() + b" "
    print("fed", flush=True)
train_apart(texts(), 60_000, "<|endoftext|>")
print("trained", flush=True)
"""


def trainers_of(pid):
    found = []
    for child in psutil.Process(pid).children():
        try:
            if "phalanx.data.prepare.trainer" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
    return found


@pytest.mark.parametrize("texts", [TEXTS, [b"", "\u00e4\U0001f600 \n".encode() * 50_000, b"\0"], []])
def test_train_apart_gives_the_bytes_of_training_here(texts):
    assert train_apart(texts, 400, "<|end|>") == train_tokenizer(iter(texts), 400, "<|end|>")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_training_ends_at_once_with_whoever_waits_for_it(signum):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SLOW]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "fed\n"
        (trainer,) = until(lambda: trainers_of(process.pid))
        used_s = sum(trainer.cpu_times()[:2])
        until(lambda: sum(trainer.cpu_times()[:2]) > used_s + 0.5)  # it is busy in native code
        start_s = time.monotonic()
        process.send_signal(signum)
        said, _ = process.communicate(timeout=DEADLINE_S)
        gone, alive = psutil.wait_procs([trainer], timeout=DEADLINE_S)
    assert not alive and gone and "trained" not in said and process.returncode != 0
    assert time.monotonic() - start_s < ENDS_WITHIN_S


def test_train_apart_names_a_trainer_that_is_killed():
    def texts():
        yield TEXTS[0]
        until(lambda: trainers_of(os.getpid()))[0].kill()
        yield from [b"x" * 100_000] * 100

    with pytest.raises(
        OutsideError, match=r"that trains the tokenizer \(\d+\) died: killed by SIGKILL, .*--vocab-size"
    ):
        train_apart(texts(), 300, "<|end|>")


def test_train_apart_does_not_wait_for_a_trainer_that_takes_nothing(monkeypatch):
    monkeypatch.setattr(training, "_PATIENCE_S", 0.1)
    stopped = []

    def texts():
        yield TEXTS[0]
        stopped.extend(until(lambda: trainers_of(os.getpid())))
        stopped[0].suspend()
        yield from [b"x" * 100_000] * 100

    with pytest.raises(OutsideError, match=r"that trains the tokenizer \(\d+\) took no text for 0 s"):
        train_apart(texts(), 300, "<|end|>")
    assert stopped and not stopped[0].is_running()


def test_train_apart_ends_the_trainer_where_reading_fails():
    def texts():
        yield TEXTS[0]
        assert until(lambda: trainers_of(os.getpid()))
        raise PhalanxError("a.txt", expected="a whole file", remedy="copy it again")

    with pytest.raises(PhalanxError, match="copy it again"):
        train_apart(texts(), 300, "<|end|>")
    assert not trainers_of(os.getpid())


def test_prepare_interrupted_while_it_trains_writes_no_half_of_anything(tmp_path):
    chance, out = np.random.default_rng(0), tmp_path / "out"
    with (tmp_path / "a.jsonl").open("wb") as file:
        for _ in range(60_000):
            file.write(b'{"text": "' + chance.integers(97, 123, 300, dtype=np.uint8).tobytes() + b'"}\n')
    command = [
        sys.executable,
        "-m",
        "phalanx.cli",
        "data",
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--out",
        f"file://{out}",
    ]
    with subprocess.Popen(
        [*command, "--vocab-size", "60000"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        (trainer,) = until(lambda: trainers_of(process.pid))
        until(lambda: sum(trainer.cpu_times()[:2]) > 4)
        os.killpg(process.pid, signal.SIGINT)
        start_s = time.monotonic()
        _, said = process.communicate(timeout=DEADLINE_S)
        _, alive = psutil.wait_procs([trainer], timeout=DEADLINE_S)
    assert not alive and time.monotonic() - start_s < ENDS_WITHIN_S
    assert process.returncode == 130 and said.splitlines()[-1] == "phalanx: interrupted"
    assert sorted(path.name for path in out.rglob("*")) == ["input.json", "recipe.json"]
