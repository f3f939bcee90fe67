"""A process that prints a line a step, timed from line to line: what `loop.py` and `gpu.py` start for each side. Needs
no package but numpy.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

WARM = 5  # first steps, which don't count
DEADLINE_S = 600.0
_ROOT = Path(__file__).resolve().parents[2]
PEERS_PYTHON = str(_ROOT / ".venv-peers" / "bin" / "python")
IMPORTS = os.pathsep.join(str(_ROOT / name) for name in ("libs", "services"))  # of the model, which is ours

Clock = Callable[[], float]


class TookTooLong(SystemExit):
    """A side that had not ended when its time was over."""


def steps_of(
    command: Sequence[str],
    environ: Mapping[str, str],
    mark: str,
    clocks: Sequence[Clock] = (time.perf_counter,),
    limit_s: float = DEADLINE_S,
) -> Iterator[tuple[float, ...]]:
    """What each clock showed when each line of a step came.

    mark: what such a line has in it. Raises TookTooLong once `limit_s` are over, and SystemExit with all that was
    printed where the process does not end well. Whatever ends this ends the process and those that it started.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    is_over, lines = threading.Event(), []

    def end() -> None:
        is_over.set()
        _end(process)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if mark in line:
                yield tuple(clock() for clock in clocks)
        code = process.wait()
        if is_over.is_set():
            raise TookTooLong(f"ended by the benchmark after {limit_s:.0f} s\n{''.join(lines)}")
        if code:
            raise SystemExit("".join(lines))
    finally:
        timer.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process that leads a session, and what is left of the session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def median_step(shown: Iterator[tuple[float, ...]]) -> tuple[float, ...]:
    """Of each clock the median step behind the first ones, in its seconds."""
    steps = np.diff(np.array(list(shown)), axis=0)[WARM:]
    return tuple(float(median(of_clock)) for of_clock in steps.T)


def meeting(ranks: int) -> list[dict[str, str]]:
    """What the environment of each rank of another project's trainer says."""
    common = {
        "PYTHONPATH": os.pathsep.join(filter(None, (IMPORTS, os.environ.get("PYTHONPATH")))),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(ranks)]


def _free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
