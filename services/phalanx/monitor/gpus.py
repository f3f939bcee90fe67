"""The GPUs of all nodes with their last readings, by the source that told them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.monitor.rules.gpu import FaultCounts, GpuFault, GpuReading, gpu_faults
from phalanx.monitor.store import MonitorStore


@dataclass(frozen=True, slots=True)
class SourceState:
    """What a source said last. is_up: whether it answered. words: how it is, for people. readings: its last ones, which
    stay while it is away. read_s: when they were read, by the monotonic clock. num_bad_lines: of its last answer.
    """

    is_up: bool
    words: str
    readings: tuple[GpuReading, ...] = ()
    read_s: float = 0.0
    num_bad_lines: int = 0


class GpuBoard:
    """on_fault: is given each fault that is new. Safe for several threads."""

    def __init__(self, store: MonitorStore, on_fault: Callable[[GpuFault], None] = lambda _: None) -> None:
        self._store, self._on_fault = store, on_fault
        self._lock = threading.Lock()
        self._sources: dict[str, SourceState] = {}
        self._failures: dict[str, int] = {}
        self._bad_lines: dict[str, int] = {}
        self._faults: dict[str, FaultCounts] = store.fault_counts()

    def put(self, source: str, readings: Sequence[GpuReading], words: str, num_bad_lines: int = 0) -> None:
        """What a source read just now."""
        faults: list[GpuFault] = []
        with self._lock:
            self._sources[source] = SourceState(True, words, tuple(readings), time.monotonic(), num_bad_lines)
            self._bad_lines[source] = self._bad_lines.get(source, 0) + num_bad_lines
            changed = {}
            for reading in readings:
                before = self._faults.get(reading.key)
                counts, found = gpu_faults(before, reading)
                faults += found
                if counts != before:
                    self._faults[reading.key] = changed[reading.key] = counts
        for fault in faults:  # before they count as known: a kill in between tells them again under the same id
            self._on_fault(fault)
        for gpu, counts in changed.items():
            self._store.set_fault_counts(gpu, counts)

    def put_failure(self, source: str, words: str, *, is_failure: bool = True) -> None:
        """A source that does not answer, or has nothing to read; its last readings stay, and age."""
        with self._lock:
            before = self._sources.get(source, SourceState(False, words))
            self._sources[source] = SourceState(False, words, before.readings, before.read_s)
            self._failures[source] = self._failures.get(source, 0) + is_failure

    def sources(self) -> dict[str, SourceState]:
        """All of them, by name."""
        with self._lock:
            return dict(sorted(self._sources.items()))

    def failures(self) -> dict[str, int]:
        """Scrapes that failed so far, by source."""
        with self._lock:
            return dict(self._failures)

    def bad_lines(self) -> dict[str, int]:
        """Lines that could not be read so far, by source."""
        with self._lock:
            return dict(self._bad_lines)

    def readings(self) -> list[tuple[GpuReading, float]]:
        """Each GPU's last reading with its age in seconds, by node and index. One that two sources tell is shown as the
        newer one tells it.
        """
        now_s, found = time.monotonic(), {}
        with self._lock:
            states = sorted(self._sources.values(), key=lambda state: state.read_s)
        for state in states:
            found.update({reading.key: (reading, now_s - state.read_s) for reading in state.readings})
        return sorted(found.values(), key=lambda each: (each[0].node, each[0].index, each[0].gpu_instance))
