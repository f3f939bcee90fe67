"""Rules of attention: which kernel runs where. Pure; values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding
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
    if args.head_dim > _WIDEST_HEAD or args.head_dim % 8:
        yield Finding(
            ("model.attn_backend", "model.args.head_dim"),
            backend,
            f"sdpa or flex with heads {args.head_dim} wide: FlashAttention takes multiples of 8 up to {_WIDEST_HEAD}",
            'set it to "flex" or "sdpa"',
        )
