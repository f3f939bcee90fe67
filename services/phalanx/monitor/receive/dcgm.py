"""GPUs by NVIDIA's dcgm-exporter: its answer read line by line, its absent values told from real ones.

**Blank values.** DCGM marks what it does not know by the top of each type's range: "blank" itself and, one to three
above it, "not found", "not supported" and "not permissioned"; further ones may be added above. Everything from "blank"
on is blank: int32 from 0x7ffffff0 = 2147483632; int64 from 0x7ffffffffffffff0 = 9223372036854775792; fp64 from 2**47 =
140737488355328.0. How a value is written says which range counts: with a point or exponent it was fp64; without one it
was an integer, and int32's blanks are only the sixteen numbers up to int32's end, as an int64 may well be above them.
What is not finite, or outside of what the figure can be (exporters have shown a use of 4294967295 %), is absent too.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.monitor.receive.exposition import Sample, samples
from phalanx.monitor.rules.gpu import GpuReading

DEFAULT_PORT: Final = 9400
MAX_ANSWER_BYTES: Final = 16 << 20
MAX_GPUS: Final = 4096
INT32_BLANK, INT32_END = 0x7FFFFFF0, 0x7FFFFFFF
INT64_BLANK, FP64_BLANK = 0x7FFFFFFFFFFFFFF0, 2.0**47
_MIB: Final = float(1 << 20)


@dataclass(frozen=True, slots=True)
class _Figure:
    """What a field of DCGM says: which figure of a GPU, times what, and up to what it can be."""

    name: str
    factor: float = 1.0
    greatest: float = math.inf
    kind: type[int] | type[float] = float


_FIGURES: Final = {
    "DCGM_FI_DEV_GPU_UTIL": _Figure("utilization", 0.01, 100),
    "DCGM_FI_DEV_FB_USED": _Figure("memory_used_bytes", _MIB, 1 << 30),
    "DCGM_FI_DEV_FB_TOTAL": _Figure("memory_total_bytes", _MIB, 1 << 30),
    "DCGM_FI_DEV_GPU_TEMP": _Figure("temperature_c", 1, 1000),
    "DCGM_FI_DEV_POWER_USAGE": _Figure("power_w", 1, 100_000),
    "DCGM_FI_DEV_SM_CLOCK": _Figure("sm_clock_mhz", 1, 100_000),
    "DCGM_FI_DEV_XID_ERRORS": _Figure("xid", 1, 1_000_000, int),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _Figure("ecc_uncorrectable", 1, math.inf, int),
}
# The use of a MIG slice stands in a profiling field alone; a whole GPU's memory in parts where no total is exported.
_ENGINE: Final = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
_MEMORY_PARTS: Final = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What an answer held. num_bad_lines: lines that are none. num_absent: values that DCGM marks as absent."""

    gpus: tuple[GpuReading, ...]
    num_bad_lines: int = 0
    num_absent: int = 0


def number(text: str) -> float | int | None:
    """A value as exported; None where DCGM does not know it. text: a number of the format."""
    if text.lstrip("+-").isdigit():
        whole = int(text)
        is_blank = whole >= INT64_BLANK or INT32_BLANK <= whole <= INT32_END
        return None if is_blank or FP64_BLANK <= whole < FP64_BLANK + 16 else whole
    value = float(text)
    return None if not math.isfinite(value) or value >= FP64_BLANK else value


def read(lines: Iterable[str], host: str) -> Scrape:
    """The GPUs in an answer; MIG slices of one card stay apart. host: the node's name where no label has one."""
    num_bad = num_absent = 0
    gpus: dict[tuple[str, str, str], GpuReading] = {}
    memory: dict[tuple[str, str, str], dict[str, float]] = {}
    for sample in samples(lines):
        key = None if sample is None else _key(sample, host)
        if sample is None or key is None:
            num_bad += 1
            continue
        if key == _OF_NO_GPU or (key not in gpus and len(gpus) >= MAX_GPUS):
            continue
        reading = gpus.setdefault(key, _named(sample, host))
        value = number(sample.value)
        if value is None:
            num_absent += 1
            continue
        if sample.name in _MEMORY_PARTS:
            memory.setdefault(key, {})[sample.name] = float(value)
        figure = _FIGURES.get(sample.name)
        if figure is None and sample.name == _ENGINE and reading.utilization is None:
            figure = _Figure("utilization", 1, 1)
        if figure is not None and 0 <= value <= figure.greatest:
            scaled = figure.kind(value) if figure.kind is int else value * figure.factor
            given: dict[str, Any] = {figure.name: scaled}
            gpus[key] = replace(reading, **given)
        elif figure is not None:
            num_absent += 1
    with_memory = [_with_total(reading, memory.get(key, {})) for key, reading in gpus.items()]
    return Scrape(tuple(with_memory), num_bad, num_absent)


_OF_NO_GPU: Final = ("", "", "")


def _key(sample: Sample, host: str) -> tuple[str, str, str] | None:
    """What tells one GPU or slice from others; None for a line of a GPU that says not which, `_OF_NO_GPU` for figures
    of other things.
    """
    if not sample.name.startswith("DCGM_") or "nvswitch" in sample.labels or "nvlink" in sample.labels:
        return _OF_NO_GPU
    labels = sample.labels
    gpu = labels.get("UUID") or labels.get("uuid") or labels.get("gpu", "")
    if not gpu or not labels.get("gpu", "0").isdigit():
        return _OF_NO_GPU if "cpu" in labels or "cpucore" in labels else None
    return _host(sample, host), gpu, labels.get("GPU_I_ID", "")


def _host(sample: Sample, host: str) -> str:
    return sample.labels.get("Hostname") or sample.labels.get("hostname") or host


def _named(sample: Sample, host: str) -> GpuReading:
    labels = sample.labels
    return GpuReading(
        _host(sample, host),
        int(labels.get("gpu", "0")),
        labels.get("UUID") or labels.get("uuid", ""),
        labels.get("modelName", ""),
        labels.get("GPU_I_ID", ""),
    )


def _with_total(reading: GpuReading, memory: dict[str, float]) -> GpuReading:
    """Total memory from its parts, where the total itself is not exported."""
    if reading.memory_total_bytes is not None or not {*_MEMORY_PARTS[:2]} <= memory.keys():
        return reading
    return replace(reading, memory_total_bytes=sum(memory.values()) * _MIB)


@dataclass(frozen=True, slots=True)
class Target:
    """Where an exporter listens."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def targets_of(text: str) -> tuple[Target, ...]:
    """The targets in `host[:port],host[:port]`; raises PhalanxError."""
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        host, colon, port = part.rpartition(":") if ":" in part else (part, "", "")
        if (colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)) or not host or "/" in part:
            raise PhalanxError(
                "options.dcgm", value=part, expected="host or host:port of a dcgm-exporter", remedy="correct it"
            )
        found.append(Target(host, int(port) if colon else DEFAULT_PORT))
    return tuple(dict.fromkeys(found))


@dataclass(slots=True)
class _Fetch:
    """One request that ends by its deadline however slowly it is answered."""

    target: Target
    deadline_s: float
    connection: http.client.HTTPConnection = field(init=False)
    is_late: bool = False

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection(self.target.host, self.target.port, timeout=self.deadline_s)

    def cut(self) -> None:
        self.is_late = True
        if self.connection.sock is not None:
            self.connection.sock.close()


class ScrapeError(Exception):
    """Why there is no answer, in words."""


def fetch(target: Target, deadline_s: float, clock_s: Callable[[], float] = time.monotonic) -> list[str]:
    """The lines of an exporter's answer; raises ScrapeError. An answer of more than `MAX_ANSWER_BYTES` is refused."""
    at = _Fetch(target, deadline_s)
    watchdog = threading.Timer(deadline_s, at.cut)
    watchdog.daemon = True
    watchdog.start()
    end_s = clock_s() + deadline_s
    try:
        at.connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        answer = at.connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise ScrapeError(f"answers {answer.status}")
        parts, length = [], 0
        while part := answer.read1(1 << 16):
            parts.append(part)
            length += len(part)
            if length > MAX_ANSWER_BYTES:
                raise ScrapeError(f"answers more than {MAX_ANSWER_BYTES >> 20} MiB")
            if clock_s() > end_s:
                raise ScrapeError(f"no whole answer within {deadline_s:g} s")
        return b"".join(parts).decode(errors="replace").split("\n")
    except (OSError, http.client.HTTPException, AttributeError, ValueError) as error:
        if at.is_late or isinstance(error, TimeoutError):
            raise ScrapeError(f"no whole answer within {deadline_s:g} s") from error
        raise ScrapeError(f"away ({getattr(error, 'strerror', None) or type(error).__name__})") from error
    finally:
        watchdog.cancel()
        at.connection.close()
