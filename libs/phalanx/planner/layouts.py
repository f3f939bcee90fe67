"""Every way to lay a model out over a number of GPUs that the trainer would accept, as plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.planner.network import Cluster
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.spec.layout import Layout, window_parts
from phalanx.spec.parallel import MULTI_STAGE_SCHEDULES, V_SCHEDULES

_MOST_STAGES_PER_RANK = 8
# A shorter part of a window is not worth a ring of its own.
_LEAST_TOKENS_OF_CP = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be laid out: a model, its windows and batch, a number of GPUs.

    run: its windows and batch; what it says of the layout is free. schedules: that may be taken beside 1F1B. most_cp,
    most_ep: largest sizes of these axes.
    """

    model: ModelShape
    run: RunShape
    gpus: int
    cluster: Cluster
    schedules: tuple[str, ...] = MULTI_STAGE_SCHEDULES
    most_cp: int = 64
    most_ep: int = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout: the mesh, and in `run` zero, schedule, stages a rank, micro-batch and recompute."""

    layout: Layout
    run: RunShape


def divisors(number: int) -> list[int]:
    """Of a number above 0, in order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def layouts(task: Task) -> Iterator[Layout]:
    """Meshes of all GPUs: tp inside the fast domain and dividing what it cuts, cp where windows are long, ep over dp x
    cp for experts, pp up to a layer each, dp up to a window each."""
    model, run = task.model, task.run
    for tp in _tensor_sizes(task):
        rest = task.gpus // tp
        for cp in divisors(rest):
            if cp > task.most_cp or (cp > 1 and run.seq_len // cp < _LEAST_TOKENS_OF_CP):
                break
            if run.seq_len % window_parts(cp, tp):
                continue
            for pp in divisors(rest // cp):
                dp = rest // cp // pp
                if pp > model.n_layers or dp > run.global_batch_size:
                    continue
                for ep in _expert_sizes(task, dp * cp):
                    yield Layout(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=ep)


def largest_mesh(task: Task) -> int:
    """The most GPUs, up to the task's own and in whole nodes, that tp, pp and a window each can lay out; 0: none."""
    node, batch, found = task.cluster.gpus_per_node, task.run.global_batch_size, 0
    for tp in _tensor_sizes(replace(task, gpus=0)):
        if task.run.seq_len % tp:
            continue
        for pp in range(1, min(task.model.n_layers, task.gpus // tp) + 1):
            every = node // math.gcd(tp * pp, node)
            dp = min(batch, task.gpus // (tp * pp)) // every * every
            found = max(found, tp * pp * dp)
    return found


def _tensor_sizes(task: Task) -> list[int]:
    model = task.model
    cut = [model.n_heads, model.vocab_size, task.run.seq_len, task.gpus]
    cut += [model.expert_ffn_dim] if model.num_experts else []
    cut += [model.ffn_dim] if model.num_expert_layers < model.n_layers else []
    kv_heads = model.n_kv_heads
    sizes = (tp for tp in divisors(math.gcd(*cut)) if kv_heads % tp == 0 or tp % kv_heads == 0)
    return [tp for tp in sizes if tp <= task.cluster.nvlink_domain]


def _expert_sizes(task: Task, ranks: int) -> list[int]:
    if not task.model.num_experts:
        return [1]
    return [ep for ep in divisors(math.gcd(task.model.num_experts, ranks)) if ep <= task.most_ep]


def micro_batches(windows: int) -> list[int]:
    """Sizes that are worth trying where a rank has `windows` windows of a step, in order: 2^k and 3 x 2^k, and what
    divides the windows. One in between takes a partly empty micro-batch, or is within a third of one of these."""
    doubled = {first << power for first in (1, 3) for power in range(windows.bit_length())}
    return sorted({each for each in doubled if each <= windows}.union(divisors(windows)))


def base_candidates(task: Task, layout: Layout) -> Iterator[Candidate]:
    """Micro-batch, from small to large, recompute and zero for one mesh, on a plain 1F1B. With a pipeline zero 1 stands
    for 3 too, which costs the same time there, and 2 does not exist."""
    for size in micro_batches(task.run.global_batch_size // layout.dp):
        for recompute in (False, True):
            for zero in (1,) if layout.pp > 1 else (1, 2, 3):
                run = replace(task.run, local_batch_size=size, recompute=recompute, zero=zero)
                yield Candidate(layout, replace(run, schedule="1f1b", stages_per_rank=1))


def scheduled(task: Task, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate under every schedule that its number of layers admits."""
    yield candidate
    pp, n_layers = candidate.layout.pp, task.model.n_layers
    if pp == 1:
        return
    for per_rank in range(2, min(_MOST_STAGES_PER_RANK, n_layers // pp) + 1):
        # Uneven stages only where nothing even exists: two of them.
        if n_layers % (pp * per_rank) and per_rank != 2:
            continue
        for name in task.schedules:
            if name not in V_SCHEDULES or per_rank == 2:
                yield Candidate(candidate.layout, replace(candidate.run, schedule=name, stages_per_rank=per_rank))
