"""Rotary positions (arXiv 2104.09864), half rotation: the first half of a head pairs with its second half; in latent
attention neighbours pair.

The arithmetic is fp32 in the order in which transformers has it: at position 100,000 the last bit of a frequency is
already an angle of 0.01.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.models.args import DecoderArgs, RopeScaling


def rotary_table(position_ids: Tensor, args: DecoderArgs) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each fp32 [B, 1, S, rotary_dim], for position_ids [B, S]; halves repeated."""
    frequencies = rotary_frequencies(args, position_ids.device)
    angle = position_ids[:, None, :, None].float() * frequencies
    angle = torch.cat((angle, angle), dim=-1)
    scale = args.rope_scaling.attention_factor if args.rope_scaling else None
    if scale is None:
        return angle.cos(), angle.sin()
    return angle.cos() * scale, angle.sin() * scale


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions applied to x [B, H, S, head_dim]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


def rotate_neighbours(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As `rotate`, of elements 2 i and 2 i + 1 (DeepSeek-V3). What comes first in its pair goes to the first half:
    scores do not depend on an order that queries and keys share.
    """
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return rotate(halves, cosines, sines)


def rotary_frequencies(args: DecoderArgs, device: torch.device | str) -> Tensor:
    """The angle that each pair of a head turns by from one position to the next, fp32 [rotary_dim / 2]."""
    exponent = torch.arange(0, args.rotary_dim, 2, dtype=torch.float32, device=device) / args.rotary_dim
    period = args.rope_theta**exponent
    scaling = args.rope_scaling
    if scaling is None:
        return 1.0 / period
    if scaling.type == "linear":
        return 1.0 / period / scaling.factor
    if scaling.type == "llama3":
        return _llama3(1.0 / period, scaling)
    assert scaling.type == "yarn", "the job file's own checks know the types"
    return _yarn(period, args, scaling)


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Pairs that turn at least `high_freq_factor` times in the original window stay, those below `low_freq_factor` slow
    down by `factor`, those between move from one to the other (Llama 3.1; https://github.com/meta-llama/llama-models).
    """
    assert scaling.original_max_position_embeddings and scaling.low_freq_factor and scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequency)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _yarn(period: Tensor, args: DecoderArgs, scaling: RopeScaling) -> Tensor:
    """YaRN, "NTK-by-parts" (arXiv 2309.00071, section 3.2): a ramp over the pairs, between those that turn `beta_fast`
    and `beta_slow` times in the original window, rounded outwards to whole pairs.
    """
    window = scaling.original_max_position_embeddings
    assert window and scaling.beta_fast and scaling.beta_slow

    def pair_that_turns(times: float) -> float:
        return args.rotary_dim * math.log(window / (times * 2 * math.pi)) / (2 * math.log(args.rope_theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), args.rotary_dim - 1)
    width = last - first or 0.001
    pair = torch.arange(len(period), dtype=torch.float32, device=period.device)
    kept = 1 - ((pair - first) / width).clamp(0.0, 1.0)
    return 1.0 / (scaling.factor * period) * (1 - kept) + 1.0 / period * kept
