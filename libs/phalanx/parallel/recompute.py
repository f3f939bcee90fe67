"""Recompute of activations: what a block's inside needs again in backward is computed again instead of kept.

full: of a block only its input is kept. selective: also the outputs of matrix products and of fused attention, which
take nearly all of a block's time; norms, rotations, activations, casts and the exchanges between ranks are done again
(as torchtitan's selective op checkpointing; which layers are worth it: Korthikanti et al. 2022, arXiv 2205.05198,
section 5). Products in batches are not kept: the only ones of a decoder are the scores of unfused attention, S x S for
each head.

Either way the same operations run on the same inputs, with the random numbers of the forward, so that every gradient
has the bits that it has without recompute.

A split backward (zero-bubble schedules) takes a graph more than once: for its inputs, then for the weights, a group of
them at a time. torch's recompute would begin anew each time; `split_recompute` computes the inside once for all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.parallel.split_recompute import split_recompute

Mode = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_mm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
# By name, as they are registered only where their kernels are imported.
_KEPT_NAMES = frozenset({"torch_attn._varlen_attn", "flex_attention"})
# Marks for a profiler compute nothing, and fully_shard sets others for a module inside a block (experts over ep) when
# the block's inside is done again; torch 2.13 wants each operation as often as in forward.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def recomputing(forward: Callable[..., Any], mode: Mode, *, splits: bool = False) -> Callable[..., Any]:
    """`forward` of a block, whose inside is computed again in backward as `mode` says. splits: whether inputs and
    weights have their gradients one after the other, which selective recompute is refused with.
    """
    if mode == "none":
        return forward
    if splits:
        assert mode == "full", "the job file's check refuses the other"
        return partial(split_recompute, forward)
    if mode == "full":
        return partial(checkpoint, forward, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in _KEPT or str(operation).removesuffix(".default") in _KEPT_NAMES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
