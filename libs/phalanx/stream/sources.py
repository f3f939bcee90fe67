"""The sources that a job reads, numbered by name: each a split with an order of its own, their shards numbered through.

One shard number names one shard of one source, so records, caches, damage and proofs say no source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.objects import ObjectStore
from phalanx.stream.manifest import Split
from phalanx.stream.order import Order


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A split that is read. store: rooted at its folder; order: its own endless stream, in which shards are numbered
    from 0; first_shard: what to add to these for the number among the shards of all sources.
    """

    name: str
    store: ObjectStore
    split: Split
    order: Order
    first_shard: int = 0


def source_of_shards(sources: Sequence[Source], shards: NDArray[np.int64]) -> NDArray[np.int64]:
    """The source that holds each shard, by its number among all; int64 [n]."""
    firsts = np.array([source.first_shard for source in sources], np.int64)
    return np.searchsorted(firsts, shards, side="right") - 1
