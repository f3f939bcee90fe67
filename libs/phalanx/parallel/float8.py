"""Linear products of the layers in fp8 by torchao, which needs the extra `fp8`.

Of each product both inputs are scaled into the range of fp8, rounded, multiplied, and the sum is scaled back: forward
and both products of backward. Scales are dynamic: found from the very tensor that is rounded, one for all of it
(tensorwise; Micikevicius et al. 2022, arXiv 2209.05433, section 3.2) or one for each row that is summed over (rowwise,
as powers of two). Nothing is remembered from step to step, so a checkpoint has what it has without fp8: masters,
moments and the weights that are gathered stay as they are.

A rank scales what it multiplies: under tensor parallelism its own slice of a weight, and of the features that a
`rowwise` module takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.core.errors import PhalanxError
from phalanx.parallel.tensor import RowwiseLinear, TensorSlices
from phalanx.spec.float8_checks import MULTIPLE

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 9)  # of NVIDIA's GPUs that multiply in fp8: Ada, Hopper and later


@dataclass(frozen=True, slots=True)
class Float8Product:
    """`phalanx.parallel.precision.linear` in fp8. config, products: torchao's Float8LinearConfig and LinearMMConfig."""

    config: Any
    products: Any

    @classmethod
    def of(cls, recipe: str, device: torch.device) -> Float8Product:
        """recipe: of `training.float8_recipe`. device: one that can't multiply in fp8 multiplies the rounded inputs in
        fp32.
        """
        with _quiet():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated(device))
        shell = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"))
        return cls(config, convert_to_float8_training(shell, config=config)[0].linear_mm_config)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., I] times weight [O, I] (plus bias [O]) in x's type, bfloat16."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.products, self.config)
        return y if bias is None else y + bias


class _Float8Linear(nn.Linear):
    """nn.Linear in fp8, under the same names."""

    product: Float8Product

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torchao's import tells of: kernels for other machines that it did not load."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_emulated(device: torch.device) -> bool:
    """Whether products on `device` are in fp32 of inputs that were rounded to fp8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY


def narrow_stages(
    stages: Sequence[nn.Module], slices: Sequence[TensorSlices], recipe: str, device: torch.device
) -> None:
    """Each of a rank's stages as `narrow_linears` makes it."""
    product = Float8Product.of(recipe, device)
    count = sum(narrow_linears(stage, own, product) for stage, own in zip(stages, slices, strict=True))
    how = "emulated" if is_emulated(device) else "by the GPU"
    logger.info("%d linear products of this rank's layers are in fp8, %s, %s", count, recipe, how)


def narrow_linears(stage: nn.Module, slices: TensorSlices, product: Float8Product) -> int:
    """Make the linear products of a stage's `layers` compute in fp8, in place; how many.

    Those whose sizes in the whole model are multiples of 16; never the head, routers or experts' grouped products.
    Raises PhalanxError where what tensor parallelism leaves of one is no such multiple.
    """
    chosen = list(_chosen(stage, slices.shapes))
    for name, linear in chosen:
        if any(size % MULTIPLE for size in linear.weight.shape):
            raise PhalanxError(
                "[parallel] tp",
                value=slices.shapes[f"{name}.weight"][0] // max(linear.weight.shape[0], 1),
                expected=f"to leave multiples of {MULTIPLE} of {name}.weight, where it leaves "
                f"{list(linear.weight.shape)}: training.float8_recipe multiplies in fp8",
                remedy="lower tp, or remove training.float8_recipe",
            )
        if isinstance(linear, RowwiseLinear):
            linear.product = product
        else:
            linear.__class__ = _Float8Linear
            object.__setattr__(linear, "product", product)
    return len(chosen)


def require_linears(model: nn.Module) -> None:
    """PhalanxError where nothing of a whole model would be computed in fp8."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not any(_chosen(model, shapes)):
        raise PhalanxError(
            "training.float8_recipe",
            expected=f"none with {type(model).__name__}, which has no nn.Linear inside `layers` whose sizes are "
            f"multiples of {MULTIPLE}",
            remedy="remove the key, or name the list of blocks `layers` and change their sizes",
        )


def _chosen(stage: nn.Module, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, nn.Linear]]:
    for name, inner in stage.named_modules():
        if not name.startswith("layers.") or type(inner) not in (nn.Linear, RowwiseLinear):
            continue
        assert isinstance(inner, nn.Linear)
        if not any(size % MULTIPLE for size in shapes[f"{name}.weight"]):
            yield name, inner
