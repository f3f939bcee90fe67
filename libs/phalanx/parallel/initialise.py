"""Initial weights by counter: a value depends on (seed, tensor's name, global element index) alone, whoever evaluates
it.

Normal values are Irwin-Hall sums: eight 16-bit uniforms, the 128 bits of one Philox call, added as integers. Up to the
one rounding at the end everything is exact, so neither vector width nor library can change a bit. See
docs/decisions/counter-based-initialisation.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phalanx.core.box import Box
from phalanx.core.philox import key_of, philox4x32
from phalanx.models.protocol import Initial

CHUNK_ELEMENTS = 1 << 16  # the intermediate int64 arrays stay in a core's cache
_NUM_UNIFORMS = 8
_MEAN_OF_SUM = _NUM_UNIFORMS * 65535 / 2
STD_OF_SUM = math.sqrt(_NUM_UNIFORMS * (65536**2 - 1) / 12)


def irwin_hall(index: Any, key: tuple[int, int]) -> Any:
    """Sum of eight 16-bit uniforms minus its mean, an exact integer, for each global element index (int64 array or
    tensor).
    """
    words = philox4x32((index & 0xFFFFFFFF, index >> 32, index * 0, index * 0), key)
    return sum((word & 0xFFFF) + (word >> 16) for word in words) - int(_MEAN_OF_SUM)


def initial_key(seed: int, name: str) -> tuple[int, int]:
    """The Philox key of a tensor's initial values."""
    return key_of("initial", seed, name)


def fill(local: Tensor, box: Box, global_shape: tuple[int, ...], initial: Initial, seed: int, name: str) -> None:
    """Write the initial values of `box` (in the global tensor `name`) into `local`, a tensor of the box's shape, in
    place.
    """
    if initial.std is None:
        local.fill_(initial.value)
        return
    key, scale = initial_key(seed, name), initial.std / STD_OF_SUM
    for start in range(0, box.num_elements, CHUNK_ELEMENTS):
        within = torch.arange(start, min(start + CHUNK_ELEMENTS, box.num_elements), device=local.device)
        values = irwin_hall(_global_index(within, box, global_shape), key).double() * scale
        local.view(-1)[start : start + len(within)] = values.to(local.dtype)


def _global_index(within: Tensor, box: Box, global_shape: tuple[int, ...]) -> Tensor:
    """Row-major index in the global tensor of each row-major index within the box."""
    index, stride = torch.zeros_like(within), 1
    for offset, size, global_size in reversed(list(zip(box.offset, box.shape, global_shape, strict=True))):
        index += (within % size + offset) * stride
        within = within // size
        stride *= global_size
    return index
