"""Rules over several keys: what the types of single keys cannot say. Pure; values only, no file, class or network is
looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.attention_checks import (
    context_findings,
    float16_findings,
    kernel_findings,
    loss_findings,
    optimizer_findings,
)
from phalanx.spec.data_checks import data_findings
from phalanx.spec.expert_checks import expert_findings
from phalanx.spec.finding import Finding
from phalanx.spec.float8_checks import float8_findings
from phalanx.spec.keys import LARGEST_INTEGER, bound_text
from phalanx.spec.latent_checks import latent_findings
from phalanx.spec.layout import Layout, window_parts
from phalanx.spec.model import ROPE_SCALING_KEYS, ModelArgs
from phalanx.spec.offload_checks import offload_findings
from phalanx.spec.parallel import AXES, CHOSEN, MULTI_STAGE_SCHEDULES, V_SCHEDULES, ZERO_BUBBLE_SCHEDULES, Parallel
from phalanx.spec.recompute_checks import recompute_findings
from phalanx.spec.replica_checks import layout_findings, replica_findings

if TYPE_CHECKING:
    from phalanx.spec.job import Job


def findings_of(job: Job, world_size: int | None = None) -> list[Finding]:
    """Every broken rule. Without a world size, rules that need the size of an axis that is -1 are left for
    `job.layout`."""
    stated: list[Finding] = []
    if job.parallel.layout == "auto":
        stated = [*_stated_beside_auto(job.parallel), *layout_findings(job)]
        job = job.model_copy(update={"parallel": Parallel()})
    findings = [*stated, *_axes(job.parallel, world_size), *data_findings(job), *_training(job)]
    layout = (
        None
        if findings and any("parallel.pp" in finding.keys for finding in findings)
        else resolve_axes(job.parallel, world_size)
    )
    if isinstance(job.model.args, ModelArgs):
        findings += [*_shape(job.model.args), *latent_findings(job.model.args), *_rope_scaling(job.model.args)]
        findings += _divisions(job.model.args, job.training.seq_len, job.parallel, layout)
    findings += _windows(job, layout)
    findings += _pipeline(job, layout)
    findings += [*kernel_findings(job), *loss_findings(job), *context_findings(job, layout)]
    findings += replica_findings(job, layout)
    findings += [*recompute_findings(job, layout), *optimizer_findings(job), *float16_findings(job)]
    findings += [*offload_findings(job), *float8_findings(job, layout)]
    return findings


def _stated_beside_auto(parallel: Parallel) -> Iterator[Finding]:
    """Keys that the planner chooses. By their values: a job that was stored holds every key, also those left out."""
    for name in CHOSEN:
        value, default = getattr(parallel, name), Parallel.model_fields[name].default
        filled_in = name == "stages_per_rank" and value == 2 and parallel.schedule in MULTI_STAGE_SCHEDULES
        if value != default and not filled_in:
            yield Finding(
                (f"parallel.{name}", "parallel.layout"),
                value,
                'nothing beside layout = "auto", which chooses it',
                f'remove it ({default} is its default), or set parallel.layout = "given"',
            )
    if parallel.stage_lengths is not None:
        yield Finding(
            ("parallel.stage_split", "parallel.layout"),
            parallel.stage_split,
            'cost or even beside layout = "auto", which chooses the number of stages',
            'set one of them, or parallel.layout = "given"',
        )


def resolve_axes(parallel: Parallel, world_size: int | None) -> Layout | None:
    """The layout with -1 replaced by the ranks that are left; None while that is unknown or does not come out even."""
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size > 0)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or min(sizes.values()) == 0:
        return None
    if open_axes:
        if world_size is None or world_size % given:
            return None
        sizes[open_axes[0]] = world_size // given
    return Layout(**sizes, ep=parallel.ep)


def _axes(parallel: Parallel, world_size: int | None) -> Iterator[Finding]:
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    keys = tuple(f"parallel.{axis}" for axis in AXES)
    for axis, size in sizes.items():
        if size == 0:
            yield Finding(
                (f"parallel.{axis}", *keys),
                size,
                "a size of at least 1, or -1 for the rest",
                "use 1 to switch the axis off",
            )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        first = f"parallel.{open_axes[1]}"
        yield Finding(
            (first, *keys), -1, "at most one axis with -1 (the rest)", f"give {' or '.join(open_axes)} a size"
        )
    if world_size is None or len(open_axes) > 1 or 0 in sizes.values():
        return
    given = math.prod(size for size in sizes.values() if size > 0)
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
    if open_axes and world_size % given:
        yield Finding(
            ("parallel", *keys),
            shown,
            f"sizes whose product divides the {world_size} ranks (the given ones multiply to {given})",
            "change a size, or the number of ranks (cluster.nproc x cluster.nodes)",
        )
    if not open_axes and given != world_size:
        yield Finding(
            ("parallel", *keys),
            shown or "1",
            f"sizes that multiply to the {world_size} ranks, not to {given}",
            "change a size, set one to -1 (the rest), or change the number of ranks (cluster.nproc x cluster.nodes)",
        )


def _shape(args: ModelArgs) -> Iterator[Finding]:
    name = "model.args."
    heads = (f"{name}dim", f"{name}n_heads", f"{name}head_dim")
    if not args.head_dim:
        yield Finding(
            heads, args.dim, f"a multiple of n_heads = {args.n_heads}", "change dim or n_heads, or set head_dim"
        )
    elif args.head_dim % 2 and args.mla is None:
        yield Finding(
            heads,
            args.dim,
            f"an even width of each head, not {args.head_dim} (rotary positions turn pairs)",
            "change dim, n_heads or head_dim",
        )
    if args.n_heads % args.n_kv_heads:
        yield Finding(
            (f"{name}n_kv_heads", f"{name}n_heads"),
            args.n_kv_heads,
            f"a divisor of n_heads = {args.n_heads}",
            "each key and value head serves the same number of query heads",
        )


def _rope_scaling(args: ModelArgs) -> Iterator[Finding]:
    scaling, name = args.rope_scaling, "model.args.rope_scaling."
    if scaling is None:
        return
    needed, optional = ROPE_SCALING_KEYS[scaling.type]
    for key in type(scaling).model_fields.keys() - {"type"}:
        value = getattr(scaling, key)
        if value is None and key in needed:
            yield Finding((f"{name}{key}", f"{name}type"), value, f"a value with type {scaling.type}", "set it")
        if value is not None and key not in (*needed, *optional):
            yield Finding((f"{name}{key}", f"{name}type"), value, f"none with type {scaling.type}", "remove it")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        yield Finding(
            (f"{name}high_freq_factor", f"{name}low_freq_factor"),
            high,
            f"more than low_freq_factor = {low}",
            "raise it",
        )
    fast, slow = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0
    if fast <= slow:
        yield Finding(
            (f"{name}beta_fast", f"{name}beta_slow"), fast, f"more than beta_slow = {bound_text(slow)}", "raise it"
        )
    if scaling.type == "yarn" and args.rope_theta <= 1:
        yield Finding(("model.args.rope_theta", f"{name}type"), args.rope_theta, "more than 1 with yarn", "raise it")


def _divisions(args: ModelArgs, seq_len: int, parallel: Parallel, layout: Layout | None) -> Iterator[Finding]:
    """What tensor, expert and pipeline parallelism must divide. Sizes that are still open (-1) are passed over."""
    tp = layout.tp if layout else max(parallel.tp, 1)
    split = {"n_heads": args.n_heads, "ffn_dim": args.ffn_dim, "vocab_size": args.vocab_size}
    if args.n_kv_heads % tp and tp % args.n_kv_heads:
        yield Finding(
            ("parallel.tp", "model.args.n_kv_heads"),
            tp,
            f"a divisor of model.args.n_kv_heads = {args.n_kv_heads}, or a multiple, whose ranks then share heads",
            "change parallel.tp or n_kv_heads",
        )
    if args.moe is not None:
        split["moe.expert_ffn_dim"] = args.moe.expert_ffn_dim
    for name, size in split.items():
        if size % tp:
            yield Finding(
                ("parallel.tp", f"model.args.{name}"),
                tp,
                f"a divisor of model.args.{name} = {size}",
                f"change parallel.tp or {name}",
            )
    yield from expert_findings(args, parallel, layout)


def _windows(job: Job, layout: Layout | None) -> Iterator[Finding]:
    parallel = job.parallel
    tp, cp = (layout.tp, layout.cp) if layout else (max(parallel.tp, 1), max(parallel.cp, 1))
    parts = window_parts(cp, tp)
    if job.training.seq_len % parts:
        shown = (
            f"tp x cp = {parts}" if parts == tp * cp else f"2 x cp x tp = {parts}" if tp > 1 else f"2 x cp = {parts}"
        )
        yield Finding(
            ("training.seq_len", "parallel.tp", "parallel.cp"),
            job.training.seq_len,
            f"a multiple of {shown}, because each rank holds an equal part of every window"
            + (", an early and a late one with cp" if cp > 1 else ""),
            f"use {math.ceil(job.training.seq_len / parts) * parts}, or lower tp or cp",
        )


def _pipeline(job: Job, layout: Layout | None) -> Iterator[Finding]:
    parallel = job.parallel
    pp = layout.pp if layout else parallel.pp
    if pp <= 1:
        return
    args, per_rank, schedule = job.model.args, parallel.stages_per_rank, parallel.schedule
    if isinstance(args, ModelArgs):
        if pp * per_rank > args.n_layers:
            yield Finding(
                ("parallel.pp", "parallel.stages_per_rank", "model.args.n_layers"),
                pp,
                f"at most {args.n_layers} stages, one layer each (pp x stages_per_rank is {pp * per_rank})",
                "lower pp or stages_per_rank",
            )
        yield from _stage_lengths(parallel.stage_lengths, pp * per_rank, args.n_layers)
    yield from _schedule(schedule, per_rank)
    if parallel.zero == 2:
        yield Finding(
            ("parallel.zero", "parallel.pp"),
            2,
            "1 or 3 with pp > 1, where gradients stay whole until the end of a step anyway",
            "set zero = 1 (fastest) or 3 (least memory)",
        )
    if parallel.zero == 3 and schedule in ZERO_BUBBLE_SCHEDULES:
        yield Finding(
            ("parallel.zero", "parallel.schedule", "parallel.pp"),
            3,
            f"1 with the schedule {schedule}: where weights are resharded after forward, "
            "torch 2.13 silently computes wrong gradients there",
            "set zero = 1, or choose interleaved_1f1b",
        )
    if job.compile.enable and schedule in ZERO_BUBBLE_SCHEDULES:
        yield Finding(
            ("compile.enable", "parallel.schedule", "parallel.pp"),
            True,
            f"false with the schedule {schedule}: torch 2.13 can't split a compiled backward into its two parts",
            "set it to false, or choose interleaved_1f1b",
        )


def _stage_lengths(lengths: tuple[int, ...] | None, num_stages: int, n_layers: int) -> Iterator[Finding]:
    if lengths is None:
        return
    if len(lengths) != num_stages:
        others: tuple[str, ...] = ("parallel.pp", "parallel.stages_per_rank")
        expected = f"{num_stages} numbers, one for each stage (pp x stages_per_rank)"
    elif sum(lengths) != n_layers:
        others = ("model.args.n_layers",)
        expected = f"numbers that add up to n_layers = {n_layers}, not to {sum(lengths)}"
    else:
        return
    shown = ",".join(map(str, lengths))
    yield Finding(("parallel.stage_split", *others), shown, expected, 'correct them, or set "cost"')


def _schedule(schedule: str, stages_per_rank: int) -> Iterator[Finding]:
    keys = ("parallel.stages_per_rank", "parallel.schedule", "parallel.pp")
    if schedule in ("gpipe", "1f1b") and stages_per_rank != 1:
        yield Finding(keys, stages_per_rank, f"1 with the schedule {schedule}", "remove it, or choose interleaved_1f1b")
    if schedule in V_SCHEDULES and stages_per_rank != 2:
        yield Finding(keys, stages_per_rank, f"exactly 2 with the schedule {schedule}", "remove it (2 is its default)")
    if schedule in MULTI_STAGE_SCHEDULES and schedule not in V_SCHEDULES and stages_per_rank < 2:
        yield Finding(
            keys,
            stages_per_rank,
            f"at least 2 with the schedule {schedule}",
            "remove it (2 is the default), or choose 1f1b",
        )


def _training(job: Job) -> Iterator[Finding]:
    data, schedule, training = job.data, job.lr_scheduler, job.training
    if training.seq_len * training.global_batch_size * training.steps > LARGEST_INTEGER:
        yield Finding(
            ("training.steps", "training.global_batch_size", "training.seq_len"),
            training.steps,
            f"with the other two at most {LARGEST_INTEGER:,} tokens in all",
            "lower one of them",
        )
    if job.validation.freq and data.held_out is None:
        yield Finding(
            ("validation.freq", "data.held_out"),
            job.validation.freq,
            "0 without a held-out split",
            "set data.held_out, or validation.freq = 0",
        )
    if schedule.warmup_steps > schedule.total_steps:
        yield Finding(
            ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "training.steps"),
            schedule.warmup_steps,
            f"at most lr_scheduler.total_steps = {schedule.total_steps}",
            "shorten the warm-up or lengthen the schedule",
        )
    elif schedule.decay_ratio is not None and schedule.decay_steps > schedule.total_steps - schedule.warmup_steps:
        yield Finding(
            ("lr_scheduler.decay_ratio", "lr_scheduler.warmup_steps", "lr_scheduler.total_steps"),
            schedule.decay_ratio,
            f"at most {1 - schedule.warmup_steps / schedule.total_steps:.6g}, as the decay begins after the warm-up",
            "lower it, or remove it: the decay then takes all steps after the warm-up",
        )
    if schedule.decay_type != "none" and schedule.min_lr_factor == 0 and schedule.total_steps < training.steps:
        yield Finding(
            ("lr_scheduler.total_steps", "training.steps"),
            schedule.total_steps,
            f"at least training.steps = {training.steps}, because the learning rate is 0 from there on",
            "raise it, or set min_lr_factor above 0",
        )
