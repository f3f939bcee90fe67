"""Measures how the training thread spends a step: at every moment it is in exactly one part, so that the parts sum up
to the wall time.

On a CPU each change of the part reads the host's clock. On a GPU the host runs ahead of the device, so from the end of
one step to the agreement of the ranks in the next (where the host waits for the device anyway) each change is a CUDA
event on the stream that computes, and the parts are what lies between the events there; behind the agreement the
host's clock counts again. What the device still did of the last update when a step began is the optimizer's.

Communication is what `torch.distributed` waits for: the time in `Work.wait` of the training thread, or of autograd on
its behalf. On gloo that is all a rank is blocked for, the wait for slower ranks included. On a GPU it is what a wait
holds up the computing stream for; waits that FSDP puts between streams by itself are seen only as longer forward and
backward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.core.step_parts import Part, StepParts

Result = TypeVar("Result")
WHOLE = frozenset({Part.DATA, Part.CHECKPOINT, Part.EVALUATION})  # their own communication belongs to them


class _DeviceTimeline:
    """Events on the stream that computes, from one settlement to the next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._ended: list[tuple[Part, torch.cuda.Event]] = []
        self._first = self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def is_current(self) -> bool:
        """Whether what this thread now gives the device goes to the stream that is measured."""
        return bool(torch.cuda.current_stream(self._stream.device) == self._stream)

    def end(self, part: Part) -> None:
        self._ended.append((part, self._event()))

    def settle(self) -> dict[Part, float]:
        """Seconds of each part on the device; waits for the last event."""
        seconds, before = dict.fromkeys(Part, 0.0), self._first
        if self._ended:
            self._ended[-1][1].synchronize()
        for part, event in self._ended:
            seconds[part] += before.elapsed_time(event) * 1e-3
            before = event
        return seconds


class StepClock:
    """One rank's clock. It runs from `start` on; before that, `part` costs and counts nothing. The thread that starts
    it is the one that trains. now_s: gives seconds, from any begin.
    """

    def __init__(self, device: torch.device, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now_s = device, now_s
        self._seconds = dict.fromkeys(Part, 0.0)
        self._inside: list[Part] = []
        self._since_s: float | None = None
        self._timeline_since_s = 0.0
        self._timeline: _DeviceTimeline | None = None
        self._thread = 0

    def start(self) -> None:
        """A step begins now."""
        self._thread = threading.get_ident()
        self._seconds = dict.fromkeys(Part, 0.0)
        self._since_s = self._timeline_since_s = self._now_s()
        self._timeline = _DeviceTimeline(self._device) if self._device.type == "cuda" else None

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """The time inside belongs to `part`, but for what is inside another one within."""
        if self._since_s is None or not self._is_training_thread():
            yield
            return
        self._switch()
        self._inside.append(part)
        try:
            yield
        finally:
            self._switch()
            self._inside.pop()

    def timed(self, part: Part, function: Callable[..., Result]) -> Callable[..., Result]:
        """`function`, each call of it inside `part`."""

        def call(*args: Any, **kwargs: Any) -> Result:
            with self.part(part):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def counting_waits(self) -> Iterator[None]:
        """While inside, what this process waits for in `torch.distributed` is communication where it blocks the
        training thread in a step. One clock of a process at a time.
        """
        wait = dist.Work.wait

        def wait_for_peers(work: dist.Work, *args: Any, **kwargs: Any) -> Any:  # `gang.watch` knows it by its name
            if (self._inside and self._inside[-1] in WHOLE) or not self._blocks_computing():
                return wait(work, *args, **kwargs)
            with self.part(Part.COMMUNICATION):
                return wait(work, *args, **kwargs)

        dist.Work.wait = wait_for_peers  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]

    def agreed(self) -> None:
        """The device has just done all that it was given."""
        if self._timeline is None or self._since_s is None:
            return
        self._switch()
        on_device = self._timeline.settle()
        for part, seconds in on_device.items():
            self._seconds[part] += seconds
        self._seconds[Part.OPTIMIZER] += self._since_s - self._timeline_since_s - sum(on_device.values())
        self._timeline = None

    def end_step(self) -> StepParts:
        """The parts of the step that ends now; the next one begins at this moment."""
        assert self._since_s is not None, "start() comes first"
        self.agreed()
        self._switch()
        parts, since_s = StepParts.of(self._seconds), self._since_s
        self.start()
        self._since_s = self._timeline_since_s = since_s
        return parts

    def _switch(self) -> None:
        """What ran until now is counted."""
        now_s, current = self._now_s(), self._inside[-1] if self._inside else Part.REST
        if self._timeline is not None:
            self._timeline.end(current)
        elif self._since_s is not None:
            self._seconds[current] += now_s - self._since_s
        self._since_s = now_s

    def _is_training_thread(self) -> bool:
        """Also a thread in which autograd runs a backward pass, for which the training thread waits."""
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def _blocks_computing(self) -> bool:
        return self._timeline is None or self._timeline.is_current()
