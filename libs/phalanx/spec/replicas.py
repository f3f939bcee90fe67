"""What replicas over slow links tell each other less of: `[local_updates]`, `[gradient_compression]`."""

from __future__ import annotations

from typing import Literal

from phalanx.spec.keys import Mark, Section, key


class LocalUpdates(Section):
    """Each replica (`parallel.dp_replicate`) trains by itself for some steps, then an outer optimizer moves all of them
    to one place (DiLoCo)."""

    steps: int = key(
        Mark.IDENTITY,
        "Steps that each replica trains by itself between two updates of the outer optimizer; 0: replicas sum their "
        "gradients at every step.",
        0,
        unit="steps",
        ge=0,
    )
    outer_lr: float = key(
        Mark.IDENTITY, "Learning rate of the outer optimizer; 1 with outer_momentum 0 averages the replicas.", 0.7, gt=0
    )
    outer_momentum: float = key(Mark.IDENTITY, "Nesterov momentum of the outer optimizer.", 0.9, ge=0, lt=1)


class GradientCompression(Section):
    """How replicas (`parallel.dp_replicate`) tell each other of their gradients at each step."""

    method: Literal["none", "powersgd", "onebit_adam"] = key(
        Mark.IDENTITY,
        "What is sent instead of gradients: `powersgd`: products of narrow matrices; `onebit_adam`: the signs of "
        "AdamW's momentum, its second moment frozen behind the warm-up.",
        "none",
    )
    rank: int = key(Mark.IDENTITY, "Columns of PowerSGD's narrow matrices.", 4, unit="elements", gt=0)
    compressed: Literal["hidden", "matrices"] = key(
        Mark.IDENTITY,
        "What PowerSGD takes apart: the matrices inside the model's `layers`, so neither embeddings nor the head, or "
        "all of two or more dimensions.",
        "hidden",
    )
    warmup_steps: int = key(
        Mark.IDENTITY, "Updates with gradients as they are before the first that is compressed.", 0, unit="steps", ge=0
    )
