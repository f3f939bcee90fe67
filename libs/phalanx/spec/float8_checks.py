"""Rules of products in fp8: what they need and can't be combined with. Pure; values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.finding import Finding
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelArgs
from phalanx.spec.parallel import ZERO_BUBBLE_SCHEDULES

if TYPE_CHECKING:
    from phalanx.spec.job import Job

KEY = "training.float8_recipe"
MULTIPLE = 16  # of every size of a product in fp8, which is what the kernels of GPUs take
_REMEDY = f"change one of them, or remove {KEY}"


def float8_findings(job: Job, layout: Layout | None) -> Iterator[Finding]:
    """What `training.float8_recipe` can't be combined with. Sizes that are still open (-1) are passed over."""
    if job.training.float8_recipe == "none":
        return
    parallel, recipe = job.parallel, job.training.float8_recipe
    if job.training.mixed_precision_param != "bfloat16":
        yield Finding(
            (KEY, "training.mixed_precision_param"),
            recipe,
            'none, or training.mixed_precision_param = "bfloat16", from which products are rounded and into which '
            "they are summed",
            'set that to "bfloat16", or remove the recipe',
        )
    sizes = layout or Layout(cp=max(parallel.cp, 1), tp=max(parallel.tp, 1), pp=max(parallel.pp, 1))
    tokens = parallel.local_batch_size * job.training.seq_len // sizes.cp
    if tokens % MULTIPLE:
        yield Finding(
            (KEY, "parallel.local_batch_size", "training.seq_len", "parallel.cp"),
            recipe,
            f"none, or a multiple of {MULTIPLE} tokens in a micro-batch of one rank, which has {tokens} "
            "(local_batch_size x seq_len / cp)",
            _REMEDY,
        )
    if sizes.pp > 1 and parallel.schedule in ZERO_BUBBLE_SCHEDULES:
        yield Finding(
            (KEY, "parallel.schedule", "parallel.pp"),
            recipe,
            f"none with the schedule {parallel.schedule}, whose backward runs in two parts: torchao computes both "
            "gradients of a product in fp8 together",
            "choose interleaved_1f1b, or remove the recipe",
        )
    if isinstance(job.model.args, ModelArgs):
        yield from _sizes(job.model.args, recipe, sizes.tp)


def _sizes(args: ModelArgs, recipe: str, tp: int) -> Iterator[Finding]:
    """Of the built-in decoder. What is no multiple of 16 in the whole model stays in bfloat16."""
    if args.dim % MULTIPLE:
        yield Finding(
            (KEY, "model.args.dim"),
            recipe,
            f"none, or a multiple of {MULTIPLE} as model.args.dim = {args.dim}, which every product of a layer has",
            _REMEDY,
        )
        return
    kv_heads = max(args.n_kv_heads // tp, 1)
    cut = {
        "n_heads": (args.n_heads * args.head_dim, args.n_heads * args.head_dim // tp),
        "n_kv_heads": (args.n_kv_heads * args.head_dim, kv_heads * args.head_dim),
    }
    if args.mla is not None:
        widths = {
            "qk_nope_head_dim": args.mla.qk_nope_head_dim + args.mla.v_head_dim,
            "v_head_dim": args.mla.v_head_dim,
        }
        cut |= {f"mla.{key}": (args.n_heads * width, args.n_heads * width // tp) for key, width in widths.items()}
    if args.ffn_dim:
        cut["ffn_dim"] = (args.ffn_dim, args.ffn_dim // tp)
    if args.moe is not None and args.moe.num_shared_experts:
        width = args.moe.num_shared_experts * args.moe.expert_ffn_dim
        cut["moe.expert_ffn_dim"] = (width, width // tp)
    for name, (whole, local) in cut.items():
        if not whole % MULTIPLE and local % MULTIPLE:
            yield Finding(
                (KEY, "parallel.tp", f"model.args.{name}"),
                recipe,
                f"none, or a tp that leaves each rank a multiple of {MULTIPLE} of what model.args.{name} makes "
                f"{whole} wide, where {tp} leaves {local}",
                f"lower parallel.tp, or remove {KEY}",
            )
