"""How is learnt: `[training]`, `[optimizer]`, `[lr_scheduler]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from phalanx.spec.keys import LARGEST_INTEGER, Mark, Section, key
from phalanx.spec.own import OWN_PATTERN, require_json

LEAST_OFFLOAD_GIB = 0.001
LOSS_SCALE_KEYS = ("loss_scale_init", "loss_scale_growth", "loss_scale_backoff", "loss_scale_interval")


class Training(Section):
    """Length, batch and numerics of the run."""

    seq_len: int = key(Mark.IDENTITY, "Tokens of one window.", unit="tokens", gt=0)
    steps: int = key(Mark.FREE, "Step at which the run is done.", unit="steps", gt=0)
    global_batch_size: int = key(
        Mark.JOURNALED, "Windows of one step over all ranks, whatever the layout.", unit="windows", gt=0
    )
    seed: int = key(Mark.IDENTITY, "Seed of the weights, the order and dropout.", 0, ge=0, le=LARGEST_INTEGER)
    max_norm: float = key(
        Mark.IDENTITY, "Gradient norm above which gradients are scaled down; 0 never does.", 1.0, ge=0
    )
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = key(
        Mark.IDENTITY,
        "Type that weights have in forward and backward; masters are always float32. With float16 the loss is scaled.",
        "bfloat16",
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = key(
        Mark.IDENTITY,
        "Type in which gradients are summed: over ranks, and over micro-batches where they stay whole until the last "
        "one.",
        "float32",
    )
    float8_recipe: Literal["none", "tensorwise", "rowwise"] = key(
        Mark.IDENTITY,
        "How the linear products of the layers are computed in fp8 (needs `phalanx[fp8]`): not at all, with one scale "
        "for each tensor, or with one for each of its rows; weights are then bfloat16.",
        "none",
    )
    loss_scale_init: float = key(
        Mark.IDENTITY, "Factor on the loss at the first step of weights of float16.", 65536.0, ge=1, le=2.0**40
    )
    loss_scale_growth: float = key(
        Mark.IDENTITY, "What the factor is multiplied by after enough finite steps.", 2.0, gt=1, le=65536.0
    )
    loss_scale_backoff: float = key(
        Mark.IDENTITY, "What the factor is multiplied by where gradients overflowed.", 0.5, gt=0, lt=1
    )
    loss_scale_interval: int = key(
        Mark.IDENTITY, "Finite steps in a row after which the factor grows.", 2000, unit="steps", gt=0
    )
    non_finite: Literal["skip", "stop"] = key(
        Mark.IDENTITY, "What all ranks do together at a non-finite gradient: skip the update, or stop.", "skip"
    )
    deterministic: bool = key(Mark.FREE, "Whether only deterministic kernels are used (slower on a GPU).", False)


class Optimizer(Section):
    """AdamW with decoupled weight decay, Muon, or a class of your own."""

    name: Literal["adamw", "muon"] = key(
        Mark.IDENTITY,
        "The optimizer. `muon`: for the matrices inside the model's `layers`, and AdamW for all else.",
        "adamw",
        shapes=True,
    )
    class_: str | None = key(
        Mark.IDENTITY,
        "Your own torch.optim.Optimizer as `package.module:Class`, called with parameters, `lr`, `optimizer.args` and, "
        "where it takes it, `weight_decay`. Its rule must be element-wise.",
        None,
        alias="class",
        pattern=OWN_PATTERN,
        shapes=True,
    )
    args: dict[str, Any] = key(Mark.IDENTITY, "Keyword arguments of `optimizer.class`.", {})
    lr: float = key(Mark.IDENTITY, "Peak learning rate.", gt=0)
    beta1: float = key(Mark.IDENTITY, "Decay of the first moment.", 0.9, ge=0, lt=1)
    beta2: float = key(Mark.IDENTITY, "Decay of the second moment.", 0.95, ge=0, lt=1)
    eps: float = key(Mark.IDENTITY, "Added to the root of the second moment.", 1e-8, gt=0)
    weight_decay: float = key(Mark.IDENTITY, "Decoupled weight decay, times the learning rate.", 0.1, ge=0)
    momentum: float = key(Mark.IDENTITY, "Decay of Muon's momentum.", 0.95, ge=0, lt=1)
    ns_steps: int = key(
        Mark.IDENTITY, "Newton-Schulz iterations by which Muon makes an update orthogonal.", 5, gt=0, le=100
    )
    decayed: Literal["matrices", "hidden", "all"] = key(
        Mark.IDENTITY,
        "Which parameters weight decay acts on: all of two or more dimensions; of them those inside the model's "
        "`layers`, so neither embeddings nor the head; all, norms and biases too.",
        "matrices",
    )
    implementation: Literal["fused", "foreach", "for-loop"] = key(Mark.FREE, "Kernel of the update.", "fused")
    offload: Literal["none", "nvme"] = key(
        Mark.FREE,
        "Where the optimizer's state lies: in memory, or in pages of a file on a local disk, of which an update has a "
        "few in memory at a time; the numbers are the same.",
        "none",
    )
    offload_folder: str | None = key(
        Mark.FREE,
        "Folder on each node's own disk where ranks keep that file; it has no name there and goes with its rank.",
        None,
        min_length=1,
    )
    offload_gib: float = key(
        Mark.FREE,
        "Memory of one rank for the pages that are in use; more than 0.25 is not taken.",
        0.25,
        unit="GiB",
        ge=LEAST_OFFLOAD_GIB,
    )

    @field_validator("args")
    @classmethod
    def _args_are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        require_json(value)
        return value


class LrScheduler(Section):
    """Learning rate over steps: a linear warm-up, a stable phase where one is wanted, then a decay."""

    warmup_steps: int = key(Mark.IDENTITY, "Steps of linear warm-up from 0.", 0, unit="steps", ge=0)
    total_steps: int = key(
        Mark.IDENTITY,
        "Step at which the decay ends; set it if `training.steps` may grow later.",
        0,
        unit="steps",
        shown="training.steps",
        gt=0,
    )
    decay_type: Literal["cosine", "linear", "sqrt", "none"] = key(
        Mark.IDENTITY, "Shape of the decay: `sqrt` falls as 1 - sqrt(part of the decay that is done).", "cosine"
    )
    decay_ratio: float | None = key(
        Mark.IDENTITY,
        "Part of `total_steps` that the decay takes, at their end; before it the rate stays at its peak (warm-up, "
        "stable, decay).",
        None,
        shown="all steps after the warm-up",
        gt=0,
        le=1,
    )
    min_lr_factor: float = key(Mark.IDENTITY, "Learning rate at the end, as a part of the peak.", 0.1, ge=0, le=1)

    @property
    def decay_steps(self) -> int:
        """Steps of the decay, the last of them `total_steps`."""
        if self.decay_ratio is None:
            return self.total_steps - self.warmup_steps
        return max(1, round(self.decay_ratio * self.total_steps))
