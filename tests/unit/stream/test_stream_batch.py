"""The batch rule."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.stream.batch import SURPLUS, num_slots, slots


@settings(deadline=None)
@given(
    first=st.integers(0, 1 << 40),
    global_batch_size=st.integers(1, 200),
    dp=st.integers(1, 17),
    local=st.integers(1, 5),
    multiple_of=st.integers(1, 6),
)
def test_slots_any_layout_union_is_every_position_once(first, global_batch_size, dp, local, multiple_of):
    """Case 1 and 11: ranks are disjoint and their union is the batch, whatever the layout."""
    ranks = [slots(first, global_batch_size, dp, local, rank, multiple_of) for rank in range(dp)]
    assert {part.shape for part in ranks} == {(num_slots(global_batch_size, dp, local, multiple_of), local)}
    assert ranks[0].shape[0] % multiple_of == 0
    held = np.concatenate([part.ravel() for part in ranks])
    assert sorted(held[held != SURPLUS]) == list(range(first, first + global_batch_size))


def test_slots_known_batch_follow_the_rule():
    """Position p goes to slot p div (dp x local), rank (p div local) mod dp."""
    assert slots(100, 7, 2, 2, 0).tolist() == [[100, 101], [104, 105]]
    assert slots(100, 7, 2, 2, 1).tolist() == [[102, 103], [106, -1]]
    assert slots(0, 1, 2, 1, 1, multiple_of=2).tolist() == [[-1], [-1]]
