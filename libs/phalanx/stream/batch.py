"""The batch rule: which window positions of a global batch each data-parallel rank reads, and in which slot. Pure.

`global_batch_size` belongs to the job, not to the layout: slots = ceil(global / (dp x local)), and a slot that has no
window left holds a surplus (-1) instead, so any dp size works and shapes stay fixed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SURPLUS = -1


def num_slots(global_batch_size: int, dp: int, local_batch_size: int, multiple_of: int = 1) -> int:
    """Slots of one step: ceil(global / (dp x local)), rounded up to what the schedule admits (`multiple_of`)."""
    assert min(global_batch_size, dp, local_batch_size, multiple_of) > 0
    needed = -(-global_batch_size // (dp * local_batch_size))
    return -(-needed // multiple_of) * multiple_of


def slots(
    first_position: int, global_batch_size: int, dp: int, local_batch_size: int, dp_rank: int, multiple_of: int = 1
) -> NDArray[np.int64]:
    """Window positions of `dp_rank` for the batch that starts at `first_position`, int64 [num_slots, local_batch_size];
    -1 is surplus.

    Position p of a batch goes to slot p div (dp x local), data-parallel rank (p div local) mod dp.
    """
    assert 0 <= dp_rank < dp and first_position >= 0
    count = num_slots(global_batch_size, dp, local_batch_size, multiple_of)
    slot = np.arange(count, dtype=np.int64)[:, None] * (dp * local_batch_size)
    within = slot + dp_rank * local_batch_size + np.arange(local_batch_size, dtype=np.int64)
    return np.where(within < global_batch_size, first_position + within, SURPLUS)
