"""The best layout of a model over a number of GPUs: the fastest that fits, and why each rival lost.

Every mesh, micro-batch, recompute and zero is timed on a plain 1F1B by the time model; other schedules differ from it
in bubble, hops and the number of micro-batches that they admit, which are exchanged. Memory, dearer to count, is
counted from the fastest down until one fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.core.errors import PhalanxError
from phalanx.planner.layouts import Candidate, Task, base_candidates, largest_mesh, layouts, scheduled
from phalanx.planner.memory import MASTER_BYTES, MOMENT_BYTES, RUNTIME_BYTES, RankMemory, rank_memory
from phalanx.planner.parameters import rank_parameters
from phalanx.planner.pipeline import PipelineRun, StageCosts, bubble_left, simulate
from phalanx.planner.software import Software, software
from phalanx.planner.stage_split import stage_layers
from phalanx.planner.stages import num_micro_batches, positions
from phalanx.planner.time import Configuration, StepTime, step_time
from phalanx.spec.layout import Layout

# Of a backward, what the weights take: the published profiles of Qi et al. 2023 (arXiv 2401.10241, section 4) have
# forward, inputs and weights near 2 : 2 : 1, as element-wise operations and attention have no weights.
WEIGHTS_OF_BACKWARD = 1 / 3
# Micro-batches up to here are timed before anything is known of their memory, which is dearer to count.
_SMALL = 8


@dataclass(frozen=True)
class Estimate:
    """A candidate with its time, and its memory once that was counted."""

    candidate: Candidate
    step: StepTime
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        return self.tokens / self.step.total_s

    def share(self, seconds: float) -> float:
        """Of the step."""
        return seconds / self.step.total_s


class Search:
    """One search, lazily: estimates in order of time, memory of those that are asked for."""

    def __init__(
        self,
        task: Task,
        limit_bytes: int,
        *,
        used: Software | None = None,
        runtime_bytes: int = RUNTIME_BYTES,
    ) -> None:
        """limit_bytes: of one GPU. runtime_bytes: what a device keeps for itself."""
        self.task, self.limit_bytes, self.runtime_bytes = task, limit_bytes, runtime_bytes
        self.used = used or software("phalanx")
        self._memory: dict[Candidate, RankMemory] = {}
        self.least_bytes = math.inf

    @cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """All candidates whose states alone fit, fastest first. Raises PhalanxError where there is none."""
        tokens = self.task.run.global_batch_size * self.task.run.seq_len
        found = []
        for layout in layouts(self.task):
            for base in self._worth_timing(layout):
                plain = self.plain_step(base)
                found += [
                    Estimate(candidate, with_schedule(plain, base, candidate), tokens)
                    for candidate in scheduled(self.task, base)
                ]
        if not found:
            raise self._nothing_to_time()
        return tuple(sorted(found, key=lambda each: (each.step.total_s, _simplicity(each.candidate))))

    def _worth_timing(self, layout: Layout) -> Iterator[Candidate]:
        """The candidates of a mesh on 1F1B whose states alone fit. A micro-batch above `_SMALL` only where the one
        before it fits as a whole, as larger ones take more."""
        before: dict[tuple[bool, int], Candidate] = {}
        for base in base_candidates(self.task, layout):
            run, key = base.run, (base.run.recompute, base.run.zero)
            if run.local_batch_size > _SMALL and (key not in before or not self.fits(before[key])):
                before.pop(key, None)
                continue
            states = self._states_bytes(base)
            self.least_bytes = min(self.least_bytes, states)
            if states <= self.limit_bytes:
                before[key] = base
                yield base

    def _nothing_to_time(self) -> PhalanxError:
        """Why no mesh is left: none has that many GPUs, or their memory does not hold the states."""
        task = self.task
        value = f"{task.gpus:,} GPUs"
        if math.isfinite(self.least_bytes):
            least, limit = self.least_bytes / 2**30, self.limit_bytes / 2**30
            return PhalanxError(
                "layout",
                value=value,
                expected=f"at least {least:,.1f} GiB a GPU for weights, gradients and optimizer state, where a layout "
                f"may fill {limit:,.1f} ({least - limit:,.1f} GiB are missing)",
                remedy="take more GPUs, larger ones, or a smaller model",
            )
        batch, layers, most = task.run.global_batch_size, task.model.n_layers, largest_mesh(task)
        fewer = f", or take {most:,} GPUs" if most else ""
        return PhalanxError(
            "layout",
            value=value,
            expected=f"a number of GPUs that is a product of tp (inside a node, dividing heads and sizes), pp (at most "
            f"{layers} layers) and dp (at most the {batch:,} windows of a step)",
            remedy=f"raise training.global_batch_size{fewer}",
        )

    def plain_step(self, candidate: Candidate) -> StepTime:
        """The time model's step of a candidate on 1F1B."""
        config = Configuration(self.task.model, candidate.layout, candidate.run, self.task.cluster, self.used)
        return step_time(config)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Of one candidate, whether or not the search would have come to it."""
        base = replace(candidate, run=replace(candidate.run, schedule="1f1b", stages_per_rank=1))
        if not isinstance(candidate.run.stage_split, str):
            held = positions(self.task.model, candidate.layout, candidate.run)
            base = replace(base, run=replace(base.run, stage_split=tuple(each.num_layers for each in held)))
        step = with_schedule(self.plain_step(base), base, candidate)
        return Estimate(candidate, step, self.task.run.global_batch_size * self.task.run.seq_len)

    def memory(self, candidate: Candidate) -> RankMemory:
        """Of the pipeline position that holds most."""
        if candidate not in self._memory:
            ranks = rank_memory(self.task.model, candidate.layout, candidate.run, self.runtime_bytes)
            self._memory[candidate] = max(ranks, key=lambda each: each.total_bytes)
        return self._memory[candidate]

    def fits(self, candidate: Candidate) -> bool:
        """Whether every rank has the memory."""
        return self.memory(candidate).total_bytes <= self.limit_bytes

    @cached_property
    def best(self) -> Estimate:
        """The fastest that fits. Raises PhalanxError where none does."""
        found = self.first(lambda _: True)
        if found is None:
            smallest = self.smallest(lambda _: True)
            assert smallest is not None
            least = self.memory(smallest.candidate)
            raise PhalanxError(
                "layout",
                value=f"{self.task.gpus} GPUs",
                expected=f"{least.total_bytes / 2**30:,.1f} GiB a GPU, which the smallest layout takes, where "
                f"one may fill {self.limit_bytes / 2**30:,.1f}",
                remedy="take more GPUs, larger ones, or a smaller model",
            )
        return found

    def first(self, wanted: Callable[[Candidate], bool]) -> Estimate | None:
        """The fastest wanted one that fits."""
        return next((each for each in self.estimates if wanted(each.candidate) and self.fits(each.candidate)), None)

    def smallest(self, wanted: Callable[[Candidate], bool]) -> Estimate | None:
        """The wanted one of the least memory."""
        asked = [each for each in self.estimates if wanted(each.candidate)]
        return min(asked, key=lambda each: self.memory(each.candidate).total_bytes, default=None)

    def _states_bytes(self, candidate: Candidate) -> float:
        """A floor of a candidate's memory: its largest rank's weights, gradients and optimizer state. Gradients count
        where nothing shards them, at a pipeline and where they wait for several micro-batches; others may have the
        place of activations.
        """
        model, layout, run = self.task.model, candidate.layout, candidate.run
        stage = max(stage_layers(model, layout.pp, run))
        held = rank_parameters(model, layout, stage, is_first=layout.pp == 1, is_last=layout.pp == 1)
        whole = layout.pp > 1 or (run.zero == 1 and num_micro_batches(layout, run) > 1)
        moments = 0 if run.paging_bytes else MOMENT_BYTES // (2 if run.optimizer == "muon" else 1)
        sharded = (MASTER_BYTES + moments) * (
            held.dense / (layout.dp_shard * layout.cp) + held.experts / max(layout.dp * layout.cp // layout.ep, 1)
        )
        if run.cpu_offload:
            sharded = 0.0
        weights = 0 if layout.pp == 1 and run.zero == 3 else run.param_bytes
        return (weights + (run.reduce_bytes if whole else 0)) * held.total + sharded + self.runtime_bytes


def with_schedule(step: StepTime, base: Candidate, candidate: Candidate) -> StepTime:
    """The step of `base`, on 1F1B, with the schedule of `candidate` instead."""
    if candidate.run.schedule == base.run.schedule:
        return step
    run = candidate.run
    micro_batches = num_micro_batches(candidate.layout, run)
    more = micro_batches / step.micro_batches
    parts = _backward_parts(step)
    left = bubble_left(run.schedule, candidate.layout.pp, run.stages_per_rank, 1.0, *(round(each, 1) for each in parts))
    return replace(
        step,
        compute_s=step.compute_s * more,
        recompute_s=step.recompute_s * more,
        tensor_s=step.tensor_s * more,
        context_s=step.context_s * more,
        expert_s=step.expert_s * more,
        pipeline_send_s=step.pipeline_send_s * more * run.stages_per_rank,
        bubble_s=step.bubble_s * left,
        micro_batches=micro_batches,
    )


def _backward_parts(step: StepTime) -> tuple[float, float]:
    """(inputs, weights) of a backward whose forward takes 1: twice the forward in all, and the recompute, which takes a
    forward, before the inputs' half."""
    again = 3 * step.recompute_s / step.compute_s
    return 2.0 * (1 - WEIGHTS_OF_BACKWARD) + again, 2.0 * WEIGHTS_OF_BACKWARD


def pipeline_run(estimate: Estimate) -> PipelineRun:
    """The step of an estimate's pipeline, simulated with even stages; activations count in passes."""
    step, run, pp = estimate.step, estimate.candidate.run, estimate.candidate.layout.pp
    per_rank = run.stages_per_rank if pp > 1 else 1
    inside = step.compute_s + step.recompute_s + step.tensor_s + step.context_s + step.expert_s
    inputs, weights = _backward_parts(step)
    unit = inside / step.micro_batches / per_rank / (1.0 + inputs + weights)
    hop_s = step.pipeline_send_s / step.micro_batches / (2 * per_rank)
    costs = StageCosts.even(pp * per_rank, unit, unit * inputs, unit * weights, p2p_s=hop_s)
    return simulate(run.schedule, pp, per_rank, step.micro_batches, costs)


def _simplicity(candidate: Candidate) -> tuple[int, ...]:
    """What decides between equal times: fewer axes, fewer stages, less recompute."""
    layout, run = candidate.layout, candidate.run
    return (layout.pp, layout.cp, layout.ep, layout.tp, run.stages_per_rank, run.zero, run.local_batch_size)
