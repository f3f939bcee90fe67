"""Rules of attention, loss and optimizer: what runs where, may be cut, or excludes another. Pure; values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelArgs

if TYPE_CHECKING:
    from phalanx.spec.job import Job

# FlashAttention 2, which varlen calls on GPUs.
_WIDEST_HEAD = 256


def kernel_findings(job: Job) -> Iterator[Finding]:
    """What the kernel of `model.attn_backend` can't do on the job's device."""
    args, backend, device = job.model.args, job.model.attn_backend, job.cluster.device
    if not isinstance(args, ModelArgs):
        return
    if backend == "flex" and device == "cpu":
        yield Finding(
            ("model.attn_backend", "cluster.device"),
            backend,
            'sdpa or varlen with cluster.device = "cpu": flex_attention of torch 2.13 computes no gradients on CPUs',
            'set it to "varlen" (documents one by one) or "sdpa"',
        )
    if backend != "varlen" or device == "cpu":
        return
    if job.training.mixed_precision_param == "float32":
        yield Finding(
            ("model.attn_backend", "training.mixed_precision_param"),
            backend,
            "sdpa or flex with float32 on GPUs: FlashAttention computes in 16 bits only",
            'set it to "flex", or training.mixed_precision_param = "bfloat16" (that is another run)',
        )
    width = max(args.head_dim, args.mla.v_head_dim) if args.mla else args.head_dim
    if width > _WIDEST_HEAD or width % 8:
        yield Finding(
            ("model.attn_backend", "model.args.mla" if args.mla else "model.args.head_dim"),
            backend,
            f"sdpa or flex with heads {width} wide: FlashAttention takes multiples of 8 up to {_WIDEST_HEAD}",
            'set it to "flex" or "sdpa"',
        )


def loss_findings(job: Job) -> Iterator[Finding]:
    """What a loss of the user's own can't be combined with."""
    if job.loss.z_loss and job.loss.fn is not None:
        yield Finding(
            ("loss.z_loss", "loss.fn"),
            job.loss.z_loss,
            "0 beside loss.fn, which says itself all that is minimised",
            "remove it and add it to the function, or remove loss.fn (without it the loss is cross-entropy)",
        )
    if job.loss.chunk_tokens and job.loss.fn is not None:
        yield Finding(
            ("loss.chunk_tokens", "loss.fn"),
            job.loss.chunk_tokens,
            "0 beside loss.fn, which is called with the logits of whole windows",
            "remove it, or loss.fn (without it the loss is cross-entropy)",
        )


def optimizer_findings(job: Job) -> Iterator[Finding]:
    """What Muon can't be combined with."""
    if job.optimizer.name != "muon":
        return
    if job.local_updates.steps:
        yield Finding(
            ("optimizer.name", "local_updates.steps"),
            "muon",
            "adamw beside local_updates: the mean of what replicas remember is known to be sound for AdamW only",
            "set it to adamw, or remove local_updates.steps",
        )
    if job.gradient_compression.method != "none":
        yield Finding(
            ("optimizer.name", "gradient_compression.method"),
            "muon",
            "adamw beside gradient_compression: what it leaves out of a step is known to be sound for AdamW only",
            "set it to adamw, or remove gradient_compression.method",
        )
    if isinstance(job.model.args, ModelArgs) and job.model.args.moe is not None:
        yield Finding(
            ("optimizer.name", "model.args.moe"),
            "muon",
            "adamw with experts, whose weights lie stacked and are no matrices of their own",
            "set it to adamw, or train a dense model",
        )
    if job.optimizer.class_ is not None:
        yield Finding(
            ("optimizer.name", "optimizer.class"),
            "muon",
            "nothing beside optimizer.class, which is the optimizer",
            "remove one of them",
        )


def float16_findings(job: Job) -> Iterator[Finding]:
    """What a scaled loss, whose gradients may overflow at any step, can't be combined with."""
    if job.training.mixed_precision_param != "float16":
        return
    name = "training.mixed_precision_param"
    if isinstance(job.model.args, ModelArgs) and job.model.args.moe is not None:
        yield Finding(
            (name, "model.args.moe"),
            "float16",
            "bfloat16 or float32 with experts, whose loss of balance is added where the loss's scale is not known",
            'set it to "bfloat16"',
        )
    if job.has_apart_replicas:
        section = "local_updates" if job.local_updates.steps else "gradient_compression"
        yield Finding(
            (name, f"{section}.{'steps' if job.local_updates.steps else 'method'}"),
            "float16",
            f"bfloat16 or float32 beside {section}: replicas that overflow one by one would have scales of their own",
            f'set it to "bfloat16", or remove {section}',
        )


def context_findings(job: Job, layout: Layout | None) -> Iterator[Finding]:
    """What the all-to-all of context parallelism can't deal out. Sizes that are still open (-1) are passed over."""
    args, parallel = job.model.args, job.parallel
    cp, tp = (layout.cp, layout.tp) if layout else (max(parallel.cp, 1), max(parallel.tp, 1))
    if cp == 1 or parallel.cp_comm_type != "a2a" or not isinstance(args, ModelArgs):
        return
    heads, kv_heads = args.n_heads // tp, max(args.n_kv_heads // tp, 1)
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        yield Finding(
            ("parallel.cp", "parallel.cp_comm_type", "parallel.tp", "model.args.n_heads", "model.args.n_kv_heads"),
            cp,
            f'with cp_comm_type = "a2a" a divisor of n_heads / tp = {heads}, and a divisor or a multiple of the '
            f"{kv_heads} heads of keys and values of a tp rank",
            'change cp or tp, or set cp_comm_type = "all_gather"',
        )
