"""Process groups of our own beside the program's: on the CPU, whatever it trains on, with a deadline of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def gloo_group(ranks: Sequence[int], deadline_s: float) -> dist.ProcessGroup:
    """A gloo group of `ranks`, which make it together in the same order, and nobody else. A collective fails after
    `deadline_s`.
    """
    timeout = timedelta(seconds=deadline_s)
    group = dist.new_group(list(ranks), timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group
