"""From a job to what the planner counts with, and the search over the layouts that this version's trainer runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.planner.gpus import Gpu, find_gpu
from phalanx.planner.layouts import Task
from phalanx.planner.memory import page_bytes, paging_memory
from phalanx.planner.network import cluster
from phalanx.planner.search import Search
from phalanx.planner.shape import LatentAttention, ModelShape, RunShape
from phalanx.spec.job import Job
from phalanx.spec.latent import MlaArgs
from phalanx.spec.layout import Layout
from phalanx.spec.parallel import MULTI_STAGE_SCHEDULES, ZERO_BUBBLE_SCHEDULES
from phalanx.spec.unbuilt import refuse_unbuilt

# Part of a GPU's memory that a layout may fill: estimates err, and allocators leave gaps.
FILLED = 0.95
MOE_SIZES = frozenset({"num_experts", "top_k", "expert_ffn_dim", "num_shared_experts"})  # what counts depend on
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def model_shape(job: Job) -> ModelShape:
    """The planner's view of the model. Raises PhalanxError for a class of the user's, whose shape nobody knows."""
    if job.model.class_ is not None:
        raise PhalanxError(
            "model.class",
            value=job.model.class_,
            expected="Phalanx's own decoder, whose shape is known without running it",
            remedy="plan with model.args of a decoder of about the same size",
        )
    args, moe = job.model.decoder, job.model.decoder.moe
    return ModelShape(
        dim=args.dim,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        ffn_dim=args.ffn_dim,
        vocab_size=args.vocab_size,
        tie_embeddings=args.tie_embeddings,
        head_width=args.head_dim,
        qk_norm=args.qk_norm,
        qkv_bias=args.qkv_bias,
        latent=_latent(args.mla) if args.mla else None,
        num_dense_layers=moe.first_k_dense if moe else 0,
        **(moe.model_dump(include=set(MOE_SIZES)) if moe else {}),
    )


def _latent(mla: MlaArgs) -> LatentAttention:
    return LatentAttention(
        query_rank=mla.q_lora_rank,
        kv_rank=mla.kv_lora_rank,
        plain_dim=mla.qk_nope_head_dim,
        rotary_dim=mla.qk_rope_head_dim,
        value_dim=mla.v_head_dim,
    )


def run_shape(job: Job) -> RunShape:
    """The planner's view of how the job trains."""
    return RunShape(
        seq_len=job.training.seq_len,
        global_batch_size=job.training.global_batch_size,
        local_batch_size=job.parallel.local_batch_size,
        zero=job.parallel.zero,
        schedule=job.parallel.schedule,
        stages_per_rank=job.parallel.stages_per_rank,
        recompute=job.activation_checkpoint.mode != "none",
        recompute_every=job.activation_checkpoint.every,
        keeps_products=job.activation_checkpoint.mode == "selective",
        document_mask=job.data.document_mask and job.model.attn_backend == "sdpa",
        chunk_tokens=job.loss.chunk_tokens,
        plain_loss=job.loss.fn is None and not job.loss.z_loss,
        optimizer=job.optimizer.name,
        ns_steps=job.optimizer.ns_steps,
        cp_comm_type=job.parallel.cp_comm_type,
        stage_split=job.parallel.stage_lengths or job.parallel.stage_split,
        cpu_offload=job.parallel.cpu_offload and job.cluster.device == "cuda",
        local_steps=job.local_updates.steps,
        compression=job.gradient_compression.method,
        compression_rank=job.gradient_compression.rank,
        compresses_ends=job.gradient_compression.compressed == "matrices",
        paging_bytes=_paging_bytes(job),
        param_bytes=_BYTES[job.training.mixed_precision_param],
        precision=_precision(job),
        reduce_bytes=_BYTES[job.training.mixed_precision_reduce],
    )


def _precision(job: Job) -> str:
    recipes = {"none": "bf16", "tensorwise": "fp8-current", "rowwise": "fp8-rowwise"}
    return "fp16" if job.training.mixed_precision_param == "float16" else recipes[job.training.float8_recipe]


def _paging_bytes(job: Job) -> int:
    """Where the optimizer runs: on a GPU one page at a time, of those that the host has."""
    if job.optimizer.offload == "none":
        return 0
    budget_bytes = int(job.optimizer.offload_gib * 2**30)
    on_gpu = job.cluster.device == "cuda" and not job.parallel.cpu_offload
    return page_bytes(budget_bytes) if on_gpu else paging_memory(budget_bytes)


def gpu_of(job: Job) -> Gpu | None:
    """The GPU that the time model knows; None where the job names none, or runs on CPUs. Raises PhalanxError for an
    unknown kind."""
    if job.cluster.device != "cuda" or job.cluster.gpu is None or job.cluster.gpu_memory_gib is not None:
        return None
    return find_gpu(job.cluster.gpu)


def new_search(
    job: Job, model: ModelShape, run: RunShape, gpus: int, gpu: Gpu, *, gpus_per_node: int | None = None
) -> Search:
    """The search over a job's model and batch on `gpus` GPUs of its kind, within what the trainer runs. gpus_per_node:
    where it is another number than the job's."""
    # The backward of what is compiled, selectively recomputed or in fp8 can't be split.
    splits = not job.compile.enable and job.activation_checkpoint.mode != "selective"
    splits = splits and job.training.float8_recipe == "none"
    refused = () if splits else ZERO_BUBBLE_SCHEDULES
    task = Task(
        model=model,
        # Lengths that were stated are of one number of stages.
        run=run if isinstance(run.stage_split, str) else replace(run, stage_split="cost"),
        gpus=gpus,
        cluster=cluster(gpu, gpus_per_node=min(gpus_per_node or job.cluster.nproc, gpus)),
        schedules=tuple(name for name in MULTI_STAGE_SCHEDULES if name not in refused),
        **_axes_of_the_trainer(job),
    )
    return Search(task, int(FILLED * gpu.memory_bytes))


def _axes_of_the_trainer(job: Job) -> dict[str, Any]:
    """Bounds of the axes that this version's trainer does not run with; none where it does not run the model at all."""
    if _is_refused(job, Layout()):
        return {}
    bounds = {"most_cp": Layout(cp=2), "most_ep": Layout(ep=2, dp_shard=2)}
    return {name: 1 for name, layout in bounds.items() if _is_refused(job, layout)}


def _is_refused(job: Job, layout: Layout) -> bool:
    try:
        refuse_unbuilt(job, layout)
    except PhalanxError:
        return True
    return False
