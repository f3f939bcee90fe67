"""Profiles on request: torch's profiler over a few steps of chosen ranks, stored beside the run.

Rank 0 looks for requests in a thread of its own, and takes the oldest one before any rank knows of it. Its number
travels with the agreement at the end of a step, so that all ranks begin with the same step. A rank that is asked
measures for so many steps; what it measured is written and stored by a thread while training goes on. Nothing is
measured, and nothing costs, in other steps.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import resource
import tempfile
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage.profiles import Profiles, Request, Taken
from phalanx.objects import ObjectExists, ObjectMissing

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
STORE_DEADLINE_S = 120.0
CUDA_EVENTS = 200_000


@dataclass(slots=True)
class _Measurement:
    """A request that is being carried out. profiler: None on a rank that is not asked."""

    request: Request
    last_step: int
    profiler: Any = None
    step: AbstractContextManager[Any] | None = None


class Profiling:
    """One rank's part. attempt: for whom requests are taken. look_every_s: how often rank 0 looks for them."""

    def __init__(
        self, profiles: Profiles, rank: int, attempt: int, device: torch.device, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._profiles, self._rank, self._attempt, self._device = profiles, rank, attempt, device
        self._look_every_s = look_every_s
        self._running: _Measurement | None = None
        self._storing: list[threading.Thread] = []
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._idle, self._closing = threading.Event(), threading.Event()
        self._idle.set()
        self._desk = threading.Thread(target=self._look, name="profiles", daemon=True)

    def open(self) -> None:
        """Rank 0 begins to look for requests."""
        if self._rank == 0:
            self._desk.start()

    def wanted(self) -> int:
        """The number of the request that begins with the next step, told by rank 0 once; 0 for none. Never blocks."""
        try:
            return self._wanted.get_nowait()
        except queue.Empty:
            return 0

    @property
    def is_measuring(self) -> bool:
        """Whether a request is being carried out: by all ranks alike, asked or not."""
        return self._running is not None

    @property
    def phase(self) -> str:
        """What the next step is to the gang. Under the profiler, or beside the writing of what it found, which holds
        the interpreter for seconds, a step takes longer than the others of the run promise.
        """
        is_storing = any(thread.is_alive() for thread in self._storing)
        return "profile" if self.is_measuring or is_storing else "step"

    def turn(self, step: int, wanted: int) -> None:
        """Between `step`, which is done, and the next one, on every rank. wanted: what rank 0 told in `step`."""
        running = self._running
        if running is not None:
            self._end_step(running)
            if step >= running.last_step:
                self._finish(running, step)
            else:
                self._begin_step(running, step + 1)
        if wanted and self._running is None:
            self._begin(wanted, step + 1)

    def close(self) -> None:
        """Stores what a measurement that the end of training cut short has so far; ends the threads."""
        self._closing.set()
        if self._running is not None:
            self._end_step(self._running)
            self._finish(self._running, self._running.last_step)
        for thread in self._storing:
            thread.join(STORE_DEADLINE_S)
        if self._desk.ident is not None:
            self._desk.join(STORE_DEADLINE_S)

    def _look(self) -> None:
        """Takes one request after another, each once the one before is measured; in a thread of rank 0."""
        while not self._closing.is_set():
            if self._idle.is_set():
                self._take_oldest()
            self._closing.wait(self._look_every_s)

    def _take_oldest(self) -> None:
        try:
            request = self._profiles.waiting()
            if request is not None and self._profiles.take(request.number, Taken(self._attempt)):
                self._idle.clear()
                self._wanted.put(request.number)
        except (OutsideError, PhalanxError) as error:
            LOG.warning("no profile is begun for now: %s", error)

    def _begin(self, number: int, first_step: int) -> None:
        try:
            request = self._profiles.request(number)
        except (OutsideError, PhalanxError, ObjectMissing) as error:
            LOG.warning("profile %d is left out on this rank: %s", number, error)
            self._idle.set()
            return
        running = self._running = _Measurement(request, first_step + request.steps - 1)
        if request.asks(self._rank):
            LOG.info("profile %d: steps %d to %d", number, first_step, running.last_step)
            running.profiler = profile(activities=self._activities(), profile_memory=True, acc_events=True)
            if self._is_cuda:
                torch.cuda.memory._record_memory_history(max_entries=CUDA_EVENTS)
            running.profiler.start()
            who = {"job_rank": self._rank, "attempt": self._attempt, "profile": number, "first_step": first_step}
            running.profiler.add_metadata_json("phalanx", json.dumps(who))
        self._begin_step(running, first_step)

    def _begin_step(self, running: _Measurement, step: int) -> None:
        if running.profiler is not None:
            running.step = record_function(f"step {step}")
            running.step.__enter__()  # type: ignore[no-untyped-call]

    def _end_step(self, running: _Measurement) -> None:
        if running.step is not None:
            running.step.__exit__(None, None, None)
            running.step = None

    def _finish(self, running: _Measurement, step: int) -> None:
        self._running = None
        if running.profiler is None:
            self._idle.set()
            return
        running.profiler.stop()
        memory: dict[str, Any] | None = None
        if self._is_cuda:
            memory = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        name = f"profile-{running.request.number}"
        self._storing.append(threading.Thread(target=self._store, args=(running, memory), name=name, daemon=True))
        self._storing[-1].start()

    def _store(self, running: _Measurement, snapshot: dict[str, Any] | None) -> None:
        """Writes the trace to a file of this host, and both files whole into storage; what fails is told in the log."""
        number = running.request.number
        try:
            with tempfile.TemporaryDirectory(prefix="phalanx-profile-") as folder:
                path = Path(folder) / "trace.json"
                running.profiler.export_chrome_trace(str(path))
                memory = snapshot if snapshot is not None else host_memory(running.profiler)
                self._profiles.put(number, self._rank, "memory", json.dumps(memory, default=str).encode())
                self._profiles.put(number, self._rank, "trace", path.read_bytes())
            LOG.info("profile %d of rank %d is stored", number, self._rank)
        except (OutsideError, PhalanxError, OSError, ObjectExists) as error:
            LOG.warning("profile %d of rank %d is lost: %s", number, self._rank, error)
        finally:
            self._idle.set()

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]


def host_memory(profiler: Any) -> dict[str, Any]:
    """What the profiler knows of memory on a CPU: bytes that each operator allocated and did not free again, summed
    over its calls, most first; and the most memory that this process ever had.
    """
    operators = [
        {"name": each.key, "calls": each.count, "self_cpu_memory_bytes": each.self_cpu_memory_usage}
        for each in profiler.key_averages()
    ]
    operators.sort(key=lambda each: -each["self_cpu_memory_bytes"])
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"device": "cpu", "pid": os.getpid(), "peak_rss_bytes": peak_kib * 1024, "operators": operators}
