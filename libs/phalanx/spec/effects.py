"""Settings that were written down but do nothing here, or spoil another: told as a warning, because the user believes
that they do something."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec.job import Job
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelArgs
from phalanx.spec.network import CHOOSES_INDEX, VARIABLES
from phalanx.spec.parallel import MULTI_STAGE_SCHEDULES
from phalanx.spec.training import LOSS_SCALE_KEYS


def without_effect(
    job: Job, layout: Layout, *, under_torchrun: bool = False, under_services: bool = False
) -> tuple[str, ...]:
    """One sentence for each key that was set and has no effect in this layout, or that spoils another.

    under_torchrun: also keys that only `phalanx run` reads. under_services: without those that only services read.
    """
    rules = [
        *_layout_rules(job, layout),
        *_recompute_rules(job),
        *_schedule_rules(job),
        *_rules(job),
        *_mixture_rules(job),
        *_optimizer_rules(job),
        *_compression_rules(job),
        *_own_rules(job),
        *_expert_rules(job),
    ]
    if under_torchrun:
        rules += _torchrun_rules(job)
    if not under_services:
        rules += _service_rules(job)
    found = [f"{name} has no effect, because {reason}" for applies, name, reason in rules if applies]
    return (*found, *_surplus_windows(job, layout), *_short_grace(job, under_torchrun))


Rule = tuple[bool, str, str]


def _optimizer_rules(job: Job) -> Iterator[Rule]:
    training, optimizer = job.training, job.optimizer
    for name in LOSS_SCALE_KEYS:
        is_set = getattr(training, name) != type(training).model_fields[name].default
        reason = 'training.mixed_precision_param is not "float16"'
        yield training.mixed_precision_param != "float16" and is_set, f"training.{name}", reason
    no_muon, reason = optimizer.name != "muon", 'optimizer.name is not "muon"'
    for name in ("momentum", "ns_steps"):
        default = type(optimizer).model_fields[name].default
        yield no_muon and getattr(optimizer, name) != default, f"optimizer.{name}", reason


def _compression_rules(job: Job) -> Iterator[Rule]:
    compression = job.gradient_compression
    no_matrices, reason = compression.method != "powersgd", 'gradient_compression.method is not "powersgd"'
    for name in ("rank", "compressed"):
        yield no_matrices and name in compression.model_fields_set, f"gradient_compression.{name}", reason
    no_warmup = compression.method == "none" and compression.warmup_steps > 0
    yield no_warmup, "gradient_compression.warmup_steps", 'gradient_compression.method is "none"'


def _recompute_rules(job: Job) -> Iterator[Rule]:
    recompute = job.activation_checkpoint
    is_set = "every" in recompute.model_fields_set and recompute.every > 1
    yield recompute.mode == "none" and is_set, "activation_checkpoint.every", 'activation_checkpoint.mode is "none"'


def _layout_rules(job: Job, layout: Layout) -> Iterator[Rule]:
    parallel, cluster = job.parallel, job.cluster
    # The schedules that need two stages fill this in by themselves.
    filled_in = parallel.schedule in MULTI_STAGE_SCHEDULES and parallel.stages_per_rank == 2
    stages_set = "stages_per_rank" in parallel.model_fields_set and not filled_in
    yield layout.pp == 1 and "schedule" in parallel.model_fields_set, "parallel.schedule", "parallel.pp is 1"
    split_set, own = "stage_split" in parallel.model_fields_set, job.model.class_ is not None
    yield layout.pp == 1 and split_set, "parallel.stage_split", "parallel.pp is 1"
    splits_itself = split_set and layout.pp > 1 and own
    yield splits_itself, "parallel.stage_split", "model.class splits its stages by itself"
    yield layout.pp == 1 and stages_set, "parallel.stages_per_rank", "parallel.pp is 1"
    method_set = "cp_comm_type" in parallel.model_fields_set
    yield layout.cp == 1 and method_set, "parallel.cp_comm_type", "parallel.cp is 1"
    on_cpu, reason = cluster.device == "cpu", 'cluster.device is "cpu"'
    yield on_cpu and cluster.gpu is not None, "cluster.gpu", reason
    yield on_cpu and cluster.gpu_memory_gib is not None, "cluster.gpu_memory_gib", reason
    yield on_cpu and parallel.cpu_offload, "parallel.cpu_offload", f"{reason}: all is in the host's memory already"
    yield from _network_rules(job)


def _network_rules(job: Job) -> Iterator[Rule]:
    network = job.cluster.network
    stated = [name for name in VARIABLES if getattr(network, name) is not None]
    if job.cluster.device == "cpu":
        yield bool(stated), "cluster.network", 'cluster.device is "cpu", where gloo connects ranks, not NCCL'
        return
    for name in stated:
        given = network.ib_gid_index is not None and name in CHOOSES_INDEX
        yield given, f"cluster.network.{name}", "cluster.network.ib_gid_index is set"
        by_socket = (network.transport or "").lower() == "socket" and name.startswith("ib_")
        yield by_socket, f"cluster.network.{name}", 'cluster.network.transport is "Socket"'


def _schedule_rules(job: Job) -> Iterator[Rule]:
    schedule = job.lr_scheduler
    no_decay, reason = schedule.decay_type == "none", 'lr_scheduler.decay_type is "none"'
    yield no_decay and "min_lr_factor" in schedule.model_fields_set, "lr_scheduler.min_lr_factor", reason
    yield no_decay and schedule.decay_ratio is not None, "lr_scheduler.decay_ratio", reason
    # Left out, it is filled in with training.steps.
    yield no_decay and schedule.total_steps != job.training.steps, "lr_scheduler.total_steps", reason


def _expert_rules(job: Job) -> Iterator[Rule]:
    moe = job.model.args.moe if isinstance(job.model.args, ModelArgs) else None
    if moe is not None:
        rate_set = "bias_update_rate" in moe.model_fields_set and not moe.selection_bias
        name = "model.args.moe"
        yield rate_set, f"{name}.bias_update_rate", f"{name}.selection_bias is false: there is no bias"
        all_groups = moe.top_groups == moe.num_groups > 1
        yield all_groups, f"{name}.num_groups", f"{name}.top_groups is all of them"


def _rules(job: Job) -> Iterator[Rule]:
    never, reason = not job.validation.freq, "validation.freq is 0"
    yield never and "windows" in job.validation.model_fields_set, "validation.windows", reason
    yield never and job.data.held_out is not None, "data.held_out", reason
    stops = job.training.non_finite == "stop" and "on_nan" in job.recovery.model_fields_set
    yield stops, "recovery.on_nan", 'training.non_finite is "stop", which ends the job at the first'
    all_stay, reason = not job.checkpoint.keep_latest_k, "checkpoint.keep_latest_k is 0: all checkpoints stay"
    yield all_stay and job.checkpoint.keep_every_n > 0, "checkpoint.keep_every_n", reason
    yield all_stay and job.checkpoint.keep_best_m > 0, "checkpoint.keep_best_m", reason
    yield from _checkpoint_rules(job)
    yield (
        job.data.held_out is None and job.data.held_out_digest is not None,
        "data.held_out_digest",
        "data.held_out is not set",
    )
    yield from _cache_rules(job)
    in_memory, reason = job.optimizer.offload == "none", 'optimizer.offload is "none"'
    for name in ("offload_folder", "offload_gib"):
        yield in_memory and name in job.optimizer.model_fields_set, f"optimizer.{name}", reason


def _checkpoint_rules(job: Job) -> Iterator[Rule]:
    checkpoint = job.checkpoint
    none_best, reason = not checkpoint.keep_best_m, "checkpoint.keep_best_m is 0"
    for name in ("keep_best_by", "keep_best_order"):
        yield none_best and name in checkpoint.model_fields_set, f"checkpoint.{name}", reason
    by_evaluation = checkpoint.keep_best_m > 0 and checkpoint.keep_best_by == "validation_loss"
    evaluates = job.validation.freq > 0 and job.data.held_out is not None
    yield by_evaluation and not evaluates, "checkpoint.keep_best_m", "nothing is evaluated on held-out data"
    for name, what in (("speculative_interval", "a speculative one"), ("memory_interval", "a copy")):
        every = getattr(checkpoint, name)
        is_covered = every > 0 and every % checkpoint.interval == 0
        yield is_covered, f"checkpoint.{name}", f"a regular checkpoint is due whenever {what} is"
        ends_first = every > job.training.steps and not is_covered
        yield ends_first, f"checkpoint.{name}", f"the job ends before {what} is due"
    speculates = checkpoint.speculative_interval
    for name in ("speculative_keep_k", "speculative_healthy_steps"):
        is_set = name in checkpoint.model_fields_set
        yield not speculates and is_set, f"checkpoint.{name}", "checkpoint.speculative_interval is 0"


def _cache_rules(job: Job) -> Iterator[Rule]:
    urls = [source.url for source in job.data.training.values()]
    urls += [job.data.held_out] if job.data.held_out is not None and job.validation.freq else []
    is_local, reason = all(url.startswith("file:") for url in urls), "data at file:// URLs is read where it lies"
    is_off = not job.cluster.cache_gib
    yield is_local and "cache_gib" in job.cluster.model_fields_set, "cluster.cache_gib", reason
    yield is_local and job.cluster.cache_folder is not None, "cluster.cache_folder", reason
    yield not is_local and is_off and job.cluster.cache_folder is not None, "cluster.cache_folder", "cache_gib is 0"


def _mixture_rules(job: Job) -> Iterator[Rule]:
    data, steps = job.data, job.training.steps
    for stage, what in data.mixture.items():
        yield what.from_step > steps, f"data.mixture.{stage}", f"the run ends at step {steps}, before it"
    for name, source in data.sources.items():
        if source.epochs is None:
            yield "when_out" in source.model_fields_set, f"data.sources.{name}.when_out", "it repeats for ever"
        never = not source.weight and not any(stage.weights.get(name) for stage in data.mixture.values())
        yield never, f"data.sources.{name}", "its weight is always 0, unless `phalanx data mix` raises it"


def _own_rules(job: Job) -> Iterator[Rule]:
    """Keys of the user's own code, and those that it replaces."""
    optimizer = job.optimizer
    own = job.model.class_ is not None
    yield own and "attn_backend" in job.model.model_fields_set, "model.attn_backend", "model.class attends by itself"
    yield job.loss.fn is None and bool(job.loss.args), "loss.args", "loss.fn is not set"
    yield optimizer.class_ is None and bool(optimizer.args), "optimizer.args", "optimizer.class is not set"
    for name in ("name", "beta1", "beta2", "eps", "implementation"):
        is_set = name in optimizer.model_fields_set
        yield optimizer.class_ is not None and is_set, f"optimizer.{name}", "optimizer.class has arguments of its own"
    evaluates = job.validation.freq > 0 and job.data.held_out is not None
    yield bool(job.metrics.fn) and not evaluates, "metrics.fn", "nothing is evaluated on held-out data"
    no_code = job.code.path is None
    yield no_code and "on_change" in job.code.model_fields_set, "code.on_change", "code.path is not set"


def _service_rules(job: Job) -> Iterator[Rule]:
    """Keys that act only on a job that is submitted."""
    only = "for a job that is submitted: without the services nobody"
    reason = f"it is {only} deletes checkpoints while it runs; `phalanx checkpoint prune` does it by hand"
    yield job.checkpoint.keep_latest_k > 0, "checkpoint.keep_latest_k", reason
    has_quota = job.checkpoint.speculative_interval > 0 and "speculative_keep_k" in job.checkpoint.model_fields_set
    yield has_quota, "checkpoint.speculative_keep_k", reason
    yield job.checkpoint.memory_interval > 0, "checkpoint.memory_interval", f"it is {only} keeps copies"
    for name in ("on_nan", "on_spike", "on_divergence", "on_hang"):
        by_ranks = name == "on_nan" and job.recovery.on_nan == "roll_back"
        is_set = name in job.recovery.model_fields_set and not by_ranks
        yield is_set, f"recovery.{name}", f"it is {only} acts on it"
    skips, reason = job.recovery.on_bad_shard == "skip", f"it is {only} decides which windows a shard costs"
    yield skips, "recovery.on_bad_shard", reason
    has_no_effect = not skips and "bad_shard_budget" in job.recovery.model_fields_set
    yield has_no_effect, "recovery.bad_shard_budget", 'recovery.on_bad_shard is not "skip"'
    yield "plan_s" in job.deadlines.model_fields_set, "deadlines.plan_s", f"it is {only} is waited for"


def _torchrun_rules(job: Job) -> Iterator[Rule]:
    launcher = "torchrun starts, counts, restarts and stops the ranks"
    sections = {"cluster": ("nproc", "nodes"), "recovery": ("max_attempts_without_progress",)}
    for section, names in sections.items():
        for name in names:
            yield name in getattr(job, section).model_fields_set, f"{section}.{name}", launcher
    yield job.deadlines.stop_grace_s is not None, "deadlines.stop_grace_s", launcher


def _surplus_windows(job: Job, layout: Layout) -> Iterator[str]:
    """A micro-batch is filled up with windows that count for nothing, so the numbers are right and time is lost."""
    local, windows = job.parallel.local_batch_size, job.training.global_batch_size
    share = -(-windows // layout.dp)
    if local > share:
        yield (
            f"parallel.local_batch_size is {local:,}: a data-parallel rank has at most {share:,} of the step's "
            f"{windows:,} windows (training.global_batch_size over {layout.dp:,} of them), and computes the rest of "
            f"each micro-batch for nothing; lower it to {share:,}"
        )


def _short_grace(job: Job, under_torchrun: bool) -> Iterator[str]:
    deadlines = job.deadlines
    needed_s = deadlines.step_s + deadlines.save_s
    if not under_torchrun and deadlines.grace_s < needed_s:
        yield (
            f"deadlines.stop_grace_s is {deadlines.grace_s:g} s, less than step_s + save_s = {needed_s:g} s: "
            "a stop may kill ranks before their checkpoint is committed"
        )
