"""What a Chrome trace of torch's profiler says of one rank: when it computed, when its communication was under way, and
how much of one lay beside the other.

Communication is the time in which the backend moves data: on gloo the work of its threads (`gloo:...`), waits for
slower peers included, on NCCL its kernels. Computing is what torch's operators do: on a CPU `aten::...` of any
thread, on a GPU all other kernels. Both are unions of spans: what overlaps counts once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]
_STEP = re.compile(r"step \d+")
_BACKENDS = ("gloo:", "nccl")


@dataclass(frozen=True, slots=True)
class Timeline:
    """Of one rank's steps, each list of spans in order and without overlaps; microseconds of the trace's clock.

    num_steps: 0 where the trace has none. by_kind: the collectives one by one, by their names in the trace.
    """

    num_steps: int
    steps: tuple[Span, ...]
    computing: tuple[Span, ...]
    communicating: tuple[Span, ...]
    by_kind: Mapping[str, tuple[Span, ...]]

    @property
    def beside_us(self) -> float:
        """How long both went on."""
        return total(intersection(self.computing, self.communicating))

    @property
    def share_beside(self) -> float:
        """Of the time of communication, the share that has computation beside it; 0 where nothing was exchanged."""
        communicating_us = total(self.communicating)
        return self.beside_us / communicating_us if communicating_us else 0.0


def timeline(trace: bytes) -> Timeline:
    """Reads a trace as `phalanx job profile` stores it: what lies in its events `step N`, or all where it has none."""
    events = [each for each in json.loads(trace)["traceEvents"] if each.get("ph") == "X"]
    marked = [
        _span(each) for each in events if _STEP.fullmatch(each["name"]) and each.get("cat") != "gpu_user_annotation"
    ]
    steps = union(marked or map(_span, events))
    has_kernels = any(each.get("cat") == "kernel" for each in events)
    by_kind: dict[str, list[Span]] = {}
    computing = []
    for each in events:
        name = each["name"]
        if has_kernels and each.get("cat") != "kernel":
            continue
        if name.startswith(_BACKENDS):
            by_kind.setdefault(name, []).append(_span(each))
        elif has_kernels or name.startswith("aten::"):
            computing.append(_span(each))
    inside = {kind: tuple(span for span in spans if _is_in(span, steps)) for kind, spans in by_kind.items()}
    communicating = union(span for spans in inside.values() for span in spans)
    return Timeline(
        len(marked),
        steps,
        intersection(union(computing), steps),
        intersection(communicating, steps),
        {k: v for k, v in inside.items() if v},
    )


def _span(event: Mapping[str, Any]) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _is_in(span: Span, steps: Iterable[Span]) -> bool:
    return any(begin <= span[0] < end for begin, end in steps)


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same time without overlaps, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return tuple(found)


def intersection(first: Sequence[Span], second: Sequence[Span]) -> tuple[Span, ...]:
    """The time that lies in both; each in order and without overlaps."""
    found, at, other = [], 0, 0
    while at < len(first) and other < len(second):
        begin = max(first[at][0], second[other][0])
        end = min(first[at][1], second[other][1])
        if begin < end:
            found.append((begin, end))
        if first[at][1] < second[other][1]:
            at += 1
        else:
            other += 1
    return tuple(found)


def total(spans: Iterable[Span]) -> float:
    """Of spans without overlaps."""
    return sum(end - begin for begin, end in spans)
