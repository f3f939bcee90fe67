"""What a training stack does, by its name and year: which kernels it has, and which traffic it overlaps.

Facts of the stacks' documentation, not fits; a stack that is unknown is taken for what was usual in its year.
`speed` is the one fitted number for a GPU kind and a stack: how much faster its computation runs than the model says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from phalanx.planner.shape import RunShape

Attention = Literal["unfused", "older", "newest"]


@dataclass(frozen=True, slots=True)
class Software:
    """A stack as the time model sees it.

    attention: unfused writes the scores to memory; older: fused, by kernels of a generation before the GPU; newest.
    fused: element-wise operations are joined, by a compiler or by hand. overlaps_*: whether traffic of data, tensor and
    pipeline parallelism runs beside computation. gradient_bytes: of one gradient on the wire and accumulated.
    extra_gradient_bytes: of a second copy in training with bf16. buffers_gib: fixed buffers of its own.
    window_kernels: fused attention knows windows (and the sinks that come with them). graphs: the host is not seen in
    layers of experts, as launches are recorded once and replayed, or experts take a fixed number of tokens. fused_loss:
    one kernel from logits of 2 bytes to the loss, so that neither they nor their gradient ever stand in fp32.
    """

    stack: str
    year: int
    attention: Attention
    fused: bool
    overlaps_data: bool
    overlaps_tensor: bool
    overlaps_pipeline: bool
    gradient_bytes: int = 4
    extra_gradient_bytes: int = 0
    buffers_gib: float = 0.0
    window_kernels: bool = True
    graphs: bool = False
    fused_loss: bool = False

    def held_gradient_bytes(self, run: RunShape) -> float:
        """Bytes of an accumulated gradient: 2 where fp16 training sums in it, else as on the wire."""
        if run.reduce_bytes == 2 or run.precision == "fp16":
            return 2.0
        return float(self.gradient_bytes + self.extra_gradient_bytes)


DEFAULT_YEAR = 2025
_USUAL: tuple[Software, ...] = (
    Software("usual", 2021, "unfused", True, False, False, False, 2),
    Software("usual", 2023, "newest", True, False, False, False),
    Software("usual", 2024, "newest", True, True, False, True),
)
_OVERLAPS: Mapping[str, object] = {"overlaps_data": True, "overlaps_tensor": True, "overlaps_pipeline": True}
# What differs from the year's usual: (stack, from this year on, changes).
_STACKS: tuple[tuple[str, int, Mapping[str, object]], ...] = (
    # Its pipeline keeps gradients of 2 bytes and sums them in 4; buckets of 5e8 elements to gather and to reduce.
    ("megatron-deepspeed", 2021, {"gradient_bytes": 4, "extra_gradient_bytes": 2, "buffers_gib": 4.0}),
    ("megatron-lm", 2021, {}),
    ("megatron-lm-zero-bubble", 2023, {"attention": "unfused"}),
    ("megatron-core", 2023, {**_OVERLAPS, "gradient_bytes": 2}),
    ("nemo", 2023, {**_OVERLAPS, "gradient_bytes": 2, "graphs": True}),
    ("megatron-bridge", 2023, {**_OVERLAPS, "gradient_bytes": 2, "window_kernels": False}),
    ("megatron-bridge", 2026, {**_OVERLAPS, "gradient_bytes": 2, "window_kernels": False, "graphs": True}),
    ("megascale", 2023, _OVERLAPS),
    ("maxtext", 2023, {"overlaps_data": True}),
    # fused_loss: loss_fn: fused_crossentropy, its models' default.
    ("llm-foundry", 2022, {"attention": "older", "fused": False, "overlaps_data": True, "fused_loss": True}),
    ("torchtitan", 2023, {"attention": "older", "fused": False, "overlaps_data": True}),
    ("phalanx", 2025, {"attention": "older", "fused": False, "overlaps_data": True}),
)


def stacks() -> tuple[str, ...]:
    """Names of the stacks that are known, in order."""
    return tuple(sorted({stack for stack, _, _ in _STACKS}))


def software(stack: str | None = None, year: int | None = None) -> Software:
    """The stack of a name and year; for an unknown one what was usual then, for an unknown year DEFAULT_YEAR's."""
    name, when = (stack or "usual").strip().lower(), year or DEFAULT_YEAR
    usual = max((each for each in _USUAL if each.year <= when), key=lambda each: each.year, default=_USUAL[0])
    known = [changes for known_stack, since, changes in _STACKS if known_stack == name and since <= when]
    changes = known[-1] if known else {}
    return replace(usual, stack=name, year=when, **changes)  # type: ignore[arg-type]


# (GPU kind, stack, year) -> factor; see `speed`.
SPEEDS: Mapping[tuple[str, str, int], float] = MappingProxyType(
    {
        ("A100", "llm-foundry", 2023): 1.029,
        ("A100", "megascale", 2024): 1.029,
        ("A100", "megatron-deepspeed", 2021): 0.809,
        ("A100", "megatron-deepspeed", 2022): 0.807,
        ("A100", "megatron-lm", 2021): 0.961,
        ("A100", "megatron-lm", 2022): 0.982,
        ("A100", "megatron-lm", 2023): 0.899,
        ("A100", "megatron-lm-zero-bubble", 2023): 1.013,
        ("B200", "megatron-bridge", 2025): 0.96,
        ("B200", "megatron-bridge", 2026): 0.959,
        ("B300", "megatron-bridge", 2026): 0.91,
        ("GB200", "megatron-bridge", 2025): 0.998,
        ("GB200", "megatron-bridge", 2026): 0.989,
        ("GB200", "nemo", 2025): 0.927,
        ("GB300", "megatron-bridge", 2025): 1.048,
        ("GB300", "megatron-bridge", 2026): 1.065,
        ("H100", "llm-foundry", 2023): 0.874,
        ("H100", "megatron-bridge", 2025): 1.04,
        ("H100", "megatron-bridge", 2026): 1.037,
        ("H100", "megatron-core", 2024): 0.924,
        ("H100", "nemo", 2024): 1.024,
        ("H100", "nemo", 2025): 1.012,
        ("H100", "torchtitan", 2024): 0.891,
        ("H100", "torchtitan", 2025): 0.916,
    }
)


def speed(gpu_kind: str, used: Software, speeds: Mapping[tuple[str, str, int], float] = SPEEDS) -> float:
    """How much faster than the model says a stack computes on a kind of GPU: its own figure of the nearest year, else 1
    (the stated default)."""
    own = {year: factor for (kind, stack, year), factor in speeds.items() if (kind, stack) == (gpu_kind, used.stack)}
    if not own:
        return 1.0
    return own[min(own, key=lambda year: (abs(year - used.year), year))]
