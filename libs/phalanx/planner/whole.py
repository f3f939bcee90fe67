"""Where ranks hold the whole model as it is: one rule for the trainer and for what the planner counts."""

from __future__ import annotations

from phalanx.planner.shape import RunShape
from phalanx.spec.layout import Layout

FP32_BYTES = 4


def holds_whole(layout: Layout, run: RunShape) -> bool:
    """Whether a rank keeps all weights of its tp part in the one type that they are stored, computed and reduced in:
    no shards, no stages, no experts apart, and nothing in the host's memory. Replicas do only at ZeRO 1: the others
    sum over them with every micro-batch, which fully_shard does.
    """
    is_one_type = run.param_bytes == run.reduce_bytes == FP32_BYTES and not run.cpu_offload
    is_alone = layout.dp_shard * layout.cp * layout.pp * layout.ep == 1
    return is_one_type and is_alone and (layout.dp_replicate == 1 or run.zero <= 1)
