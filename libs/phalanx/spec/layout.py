"""The layout: how many ranks each mesh axis has; the one value that everything about placement is computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the mesh axes, all resolved and at least 1. `ep` folds over `dp_shard x cp` and adds no ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all: the product of every axis but ep."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different windows: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard


def window_parts(cp: int, tp: int) -> int:
    """What the length of a window must be a multiple of: each of cp ranks has two of 2 cp equal chunks of it, and what
    a rank has is cut over tp.
    """
    return math.lcm(cp * tp, 2 * cp) if cp > 1 else tp
