"""How a window is shared: every token once, the same work for each rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.models.attention import check_heads
from phalanx.parallel.context import spans_of


@given(st.integers(1, 8), st.integers(1, 16))
def test_each_token_is_one_ranks_and_each_rank_sees_as_many_pairs(cp: int, chunk: int) -> None:
    length = 2 * cp * chunk
    shares = [[place for span in spans_of(length, cp, rank) for place in span] for rank in range(cp)]
    assert sorted(place for share in shares for place in share) == list(range(length))
    assert all(share == sorted(share) for share in shares)
    assert len({sum(place + 1 for place in share) for share in shares}) == 1, "queries times the keys that they see"


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 4, 4), (8, 2, 4), (8, 1, 8), (6, 6, 3)])
def test_heads_that_can_be_dealt_out_are_accepted(heads: int, kv_heads: int, ranks: int) -> None:
    check_heads(heads, kv_heads, ranks)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 4, 3), (12, 6, 4), (2, 1, 4)])
def test_heads_that_cannot_be_dealt_out_are_refused(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(PhalanxError, match=r"^\[parallel\] cp is .*all_gather"):
        check_heads(heads, kv_heads, ranks)
