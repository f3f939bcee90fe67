"""What a layout's step is made of, and why another one is slower or does not fit, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from phalanx.planner.layouts import Candidate
from phalanx.planner.memory import RankMemory
from phalanx.planner.search import Estimate, Search
from phalanx.planner.shape import RunShape
from phalanx.planner.time import StepTime

_GIB = 2**30
_PARTS = {
    "compute_s": "computation",
    "recompute_s": "recompute",
    "bubble_s": "pipeline bubble",
    "tensor_s": "exposed tensor traffic",
    "context_s": "exposed context traffic",
    "expert_s": "exposed expert traffic",
    "pipeline_send_s": "exposed hops",
    "data_s": "exposed data-parallel traffic",
    "optimizer_s": "optimizer",
    "other_s": "rest of the step",
}


@dataclass(frozen=True)
class Rival:
    """The best layout with certain properties that the winner lacks (`pp 4`, `schedule zbv`). estimate: None where no
    layout with them fits; candidate and memory are then of the smallest. reason: why it lost."""

    properties: tuple[str, ...]
    candidate: Candidate
    estimate: Estimate | None
    memory: RankMemory
    reason: str


def parts(step: StepTime) -> dict[str, float]:
    """Shares of a step by what they are for, largest first, those of a thousandth at least."""
    shares = {said: getattr(step, name) / step.total_s for name, said in _PARTS.items()}
    return {said: share for said, share in sorted(shares.items(), key=lambda each: -each[1]) if share >= 1e-3}


def memory_line(memory: RankMemory, limit_bytes: int) -> str:
    """How full the fullest GPU is: `70.1 of 79.6 GiB on pipeline rank 0`."""
    where = f" on pipeline rank {memory.position.pp_rank}"
    return f"{memory.total_bytes / _GIB:.1f} of {limit_bytes / _GIB:.1f} GiB{where}"


def step_line(step: StepTime) -> str:
    """What takes the time beside the computation: `11.2% pipeline bubble; 4.0% exposed data-parallel traffic`."""
    beside = [f"{share:.1%} {said}" for said, share in parts(step).items() if said != "computation"]
    return "; ".join(beside) or "computation alone"


def layout_line(candidate: Candidate) -> str:
    """A layout in one line: its axes above 1, then how it runs on them."""
    layout, run = candidate.layout, candidate.run
    axes = [f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1]
    axes.append(f"dp {layout.dp}")
    how = [f"zero {run.zero}", f"micro-batch {run.local_batch_size}"]
    if layout.pp > 1:
        how.append(schedule_line(candidate))
    return ", ".join([*axes, *how, recompute_line(run)])


def recompute_line(run: RunShape) -> str:
    """What of which layers is computed again."""
    if not run.recompute:
        return "no recompute"
    every = f" of every {run.recompute_every} layers' first" if run.recompute_every > 1 else ""
    return f"{run.recompute_mode} recompute{every}"


def schedule_line(candidate: Candidate) -> str:
    """The schedule, and the stages of a rank where it has several."""
    run = candidate.run
    return run.schedule + (f" x {run.stages_per_rank} stages" if run.stages_per_rank > 1 else "")


def why_not(search: Search, estimate: Estimate) -> str:
    """Why a layout is not the search's best: its memory, or the part of the step that costs it most."""
    memory, best = search.memory(estimate.candidate), search.best
    if estimate.candidate == best.candidate:
        return "the best"
    if memory.total_bytes > search.limit_bytes:
        share = search.limit_bytes / search.task.cluster.gpu.memory_bytes
        return f"does not fit: {memory_line(memory, search.limit_bytes)}, {share:.0%} of a GPU's"
    return _slower(estimate, best)


def _slower(estimate: Estimate, best: Estimate) -> str:
    """By how much, and the two parts of the step that most of it comes from, in parts of the best one's step."""
    step, total_s = estimate.step, best.step.total_s
    ratio = step.total_s / total_s - 1
    if ratio < -1e-9:
        return f"{-ratio / (1 + ratio):.1%} faster: the search does not try every micro-batch and split"
    if ratio <= 1e-9:
        return "as fast, and no simpler"
    more = {said: (getattr(step, name) - getattr(best.step, name)) / total_s for name, said in _PARTS.items()}
    most = sorted(more.items(), key=lambda each: -each[1])[:2]
    said = ", ".join(f"{name} +{share:.1%}" for name, share in most if share > 0.1 * ratio)
    return f"{ratio:.1%} slower: {said}{_surplus(estimate)}"


def _surplus(estimate: Estimate) -> str:
    """Where the schedule takes more micro-batches than the batch has."""
    layout, run = estimate.candidate.layout, estimate.candidate.run
    needed = -(-run.global_batch_size // (layout.dp * run.local_batch_size))
    if estimate.step.micro_batches == needed:
        return ""
    return f" ({estimate.step.micro_batches} micro-batches where {needed} hold the batch)"


def rivals(search: Search) -> list[Rival]:
    """For each key of the layout and each other value of it, the best candidate that has it, in order of time; those
    that don't fit last. A candidate that is the best for several stands there once."""
    found: dict[Candidate, Rival] = {}
    for said, wanted in _properties(search):
        rival = _rival(search, said, wanted)
        if rival is None:
            continue
        known = found.get(rival.candidate)
        found[rival.candidate] = replace(known, properties=(*known.properties, said)) if known else rival
    return sorted(found.values(), key=lambda each: each.estimate.step.total_s if each.estimate else float("inf"))


def _rival(search: Search, said: str, wanted: Callable[[Candidate], bool]) -> Rival | None:
    fitting = search.first(wanted)
    shown = fitting or search.smallest(wanted)
    if shown is None:
        return None
    return Rival((said,), shown.candidate, fitting, search.memory(shown.candidate), why_not(search, shown))


def _properties(search: Search) -> Iterator[tuple[str, Callable[[Candidate], bool]]]:
    """(name, whether a candidate has it) of every value that some candidate has and the best one lacks."""
    best = search.best.candidate
    for name, value_of in _KEYS.items():
        values = {value_of(each.candidate) for each in search.estimates if _near(each.candidate, best)}
        for value in sorted(values - {value_of(best)}, key=str):
            yield f"{name} {value}", _having(value_of, value)


def _near(candidate: Candidate, best: Candidate) -> bool:
    """Whether a micro-batch is within a factor of 8 of the best one's; what lies beyond would fill the table."""
    size, other = candidate.run.local_batch_size, best.run.local_batch_size
    return size <= 8 * other and other <= 8 * size


def _having(value_of: Callable[[Candidate], object], value: object) -> Callable[[Candidate], bool]:
    return lambda candidate: value_of(candidate) == value


_KEYS: dict[str, Callable[[Candidate], object]] = {
    "tp": lambda each: each.layout.tp,
    "pp": lambda each: each.layout.pp,
    "cp": lambda each: each.layout.cp,
    "ep": lambda each: each.layout.ep,
    "zero": lambda each: each.run.zero,
    "micro-batch": lambda each: each.run.local_batch_size,
    "recompute": lambda each: each.run.recompute_mode,
    "schedule": lambda each: each.run.schedule if each.layout.pp > 1 else "none",
}


def parallel_section(candidate: Candidate) -> str:
    """The layout as tables of a job file, ready to paste."""
    layout, run = candidate.layout, candidate.run
    lines = ["[parallel]", f"tp = {layout.tp}"]
    lines += [f"{axis} = {getattr(layout, axis)}" for axis in ("cp", "pp") if getattr(layout, axis) > 1]
    lines += [f"dp_shard = {layout.dp_shard}"]
    lines += [f"{axis} = {getattr(layout, axis)}" for axis in ("dp_replicate", "ep") if getattr(layout, axis) > 1]
    lines.append(f"zero = {run.zero}")
    if layout.pp > 1:
        lines += [f'schedule = "{run.schedule}"', f"stages_per_rank = {run.stages_per_rank}"]
        lines += ['stage_split = "even"'] if run.stage_split == "even" else []
    lines.append(f"local_batch_size = {run.local_batch_size}")
    lines += ["", "[activation_checkpoint]", f'mode = "{run.recompute_mode}"']
    if run.recompute and run.recompute_every > 1:
        lines.append(f"every = {run.recompute_every}")
    return "\n".join(lines) + "\n"
