"""`[parallel] layout = "auto"`: the layout of a job is the planner's, for the ranks that there are.

On GPUs it is the best of the search: the fastest whose fullest GPU stays below `FILLED` of its memory. On CPUs, whose
times nobody models, it is data parallelism with zero 3 over as many ranks as a batch has windows, where that number
divides the ranks; what is left over is tensor parallelism, or a pipeline where the model's sizes don't divide. Where
neither does, data parallelism takes all ranks, and some have nothing to compute in a step.

A job, a number of ranks and a version of Phalanx give one layout, in whatever process it is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.planner.gpus import GPUS, Gpu
from phalanx.planner.job_search import gpu_of, model_shape, new_search, run_shape
from phalanx.planner.layouts import Candidate, Task, divisors
from phalanx.planner.memory import RankMemory
from phalanx.planner.rivals import layout_line, memory_line
from phalanx.planner.search import Estimate, Search
from phalanx.planner.timeline import seconds
from phalanx.spec.checks import findings_of
from phalanx.spec.job import Job
from phalanx.spec.model import ModelArgs


@dataclass(frozen=True, slots=True)
class Chosen:
    """A job whose keys say its layout. said: what was chosen and why, in one line; empty where the job says itself."""

    job: Job
    said: str = ""


def with_layout(job: Job, world_size: int, *, gpus_per_node: int | None = None) -> Job:
    """The job of `choose`."""
    return choose(job, world_size, gpus_per_node=gpus_per_node).job


def choose(job: Job, world_size: int, *, gpus_per_node: int | None = None) -> Chosen:
    """The job with a layout for `world_size` ranks, chosen where `parallel.layout` is "auto". A recompute that the job
    states stays. gpus_per_node: where it is another number than the job's.

    Raises PhalanxError for a GPU or a model that the planner doesn't know, and where no layout fits; Problems for keys
    of the layout that stand beside "auto".
    """
    if job.parallel.layout == "given":
        return Chosen(job)
    asked = _laid_out(job)
    if problems := findings_of(job, world_size):
        raise problems[0].problem
    if job.cluster.device == "cpu":
        return _on_cpus(asked, world_size)
    return _on_gpus(asked, world_size, _known_gpu(job), gpus_per_node)


def _laid_out(job: Job, **keys: Any) -> Job:
    """The job with keys of `[parallel]` that count as given."""
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"layout": "given", **keys})})


def _on_cpus(job: Job, world_size: int) -> Chosen:
    batch = job.training.global_batch_size
    splits = [] if not isinstance(job.model.args, ModelArgs) else [dp for dp in divisors(world_size) if dp <= batch]
    axes = [{"dp_shard": dp, axis: world_size // dp} for dp in reversed(splits) for axis in ("tp", "pp")]
    if world_size <= batch:
        axes.insert(0, {"dp_shard": world_size})
    axes.append({"dp_shard": world_size})
    found = next(each for each in axes if not findings_of(_laid_out(job, **each), world_size))
    sizes = ", ".join(f"{axis} {size}" for axis, size in found.items() if size > 1 or axis == "dp_shard")
    why = f"CPUs: data parallel, for the {batch} windows of a batch"
    return Chosen(_laid_out(job, **found), f"layout for {_ranks(world_size)}: {sizes}, zero 3 ({why})")


def _on_gpus(job: Job, world_size: int, gpu: Gpu, gpus_per_node: int | None) -> Chosen:
    search = new_search(job, model_shape(job), run_shape(job), world_size, gpu, gpus_per_node=gpus_per_node)
    best, memory = _best(search.task, search.limit_bytes, job.activation_checkpoint.mode != "none")
    why = f"{seconds(best.step.total_s)} a step on {gpu.name}, {memory_line(memory, gpu.memory_bytes)}"
    said = f"layout for {_ranks(world_size)}: {layout_line(best.candidate)} ({why})"
    return Chosen(as_stated(job, best.candidate), said)


@lru_cache(maxsize=64)
def _best(task: Task, limit_bytes: int, keeps_recompute: bool) -> tuple[Estimate, RankMemory]:
    """The fastest that fits; with recompute where that is stated, which fits where anything does. Kept, since a service
    asks when a job is submitted and again when it is placed."""
    search = Search(task, limit_bytes)
    found = search.first(lambda candidate: candidate.run.recompute) if keeps_recompute else None
    best = found or search.best
    return best, search.memory(best.candidate)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number:,} ranks"


def as_stated(job: Job, candidate: Candidate) -> Job:
    """The job with a layout of the search as keys of its file."""
    layout, run = candidate.layout, candidate.run
    keys = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    keys |= {"zero": run.zero, "local_batch_size": run.local_batch_size}
    if layout.pp > 1:
        keys |= {"schedule": run.schedule, "stages_per_rank": run.stages_per_rank, "stage_split": run.stage_split}
    mode = job.activation_checkpoint.model_copy(update={"mode": run.recompute_mode})
    return _laid_out(job, **keys).model_copy(update={"activation_checkpoint": mode})


def _known_gpu(job: Job) -> Gpu:
    """The kind of GPU. Raises PhalanxError where the planner can't time it."""
    expected = 'a kind of GPU that the planner knows, beside parallel.layout = "auto"'
    remedy = f'name one of {", ".join(GPUS)}, or state the layout (parallel.layout = "given")'
    if job.cluster.gpu_memory_gib is not None:
        key, value = "cluster.gpu_memory_gib", job.cluster.gpu_memory_gib
        raise PhalanxError(key, value=value, expected=f"nothing, and {expected}", remedy=remedy)
    if job.model.class_ is not None:
        raise PhalanxError(
            "parallel.layout",
            value="auto",
            expected='"given" beside model.class on GPUs: the planner does not know the shape of such a model',
            remedy="state the axes",
        )
    try:
        gpu = gpu_of(job)
    except PhalanxError as error:
        raise PhalanxError(error.where, value=error.value, expected=expected, remedy=remedy) from error
    if gpu is None:
        raise PhalanxError("cluster.gpu", value=None, expected=expected, remedy=remedy)
    return gpu
