"""Ranges of window positions, and the order turned round: which windows a shard's loss costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_builders import numbered_documents, write_split

from phalanx.objects import open_store
from phalanx.stream import Order, ShardIndices, open_split
from phalanx.stream.spans import as_array, at_most, clipped, hold, holds, merged

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda each: (each[0], sum(each))), max_size=12)


def positions_in(spans):
    return {p for start, stop in np.asarray(spans).reshape(-1, 2).tolist() for p in range(start, stop)}


@given(SPANS)
def test_merged_holds_the_same_positions_in_ranges_that_do_not_touch(spans):
    found = merged(as_array(spans))
    assert positions_in(found) == positions_in(spans)
    assert (found[1:, 0] > found[:-1, 1]).all() and (found[:, 0] < found[:, 1]).all()


@given(SPANS, st.integers(0, 70), st.integers(0, 70))
def test_clipped_holds_what_lies_between(spans, start, stop):
    found = clipped(merged(as_array(spans)), start, max(start, stop))
    assert positions_in(found) == positions_in(spans) & set(range(start, stop))


@given(SPANS, st.integers(1, 6))
def test_at_most_holds_all_and_closes_the_smallest_gaps(spans, most):
    whole = merged(as_array(spans))
    found = at_most(whole, most)
    assert len(found) <= most or not len(whole)
    assert positions_in(found) >= positions_in(whole)
    gaps = sorted(whole[1:, 0] - whole[:-1, 1])
    closed = max(0, len(whole) - most)
    assert len(positions_in(found)) == len(positions_in(whole)) + sum(gaps[:closed])


@given(SPANS)
def test_hold_tells_each_position(spans):
    whole = merged(as_array(spans))
    told = hold(whole, np.arange(75)).tolist()
    assert told == [p in positions_in(spans) for p in range(75)] == [holds(whole, p) for p in range(75)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_spans_of_a_shard_are_the_windows_that_a_reading_of_the_epoch_touches(lengths, seq_len, block, seed):
    store = open_store("memory://")
    write_split(store, numbered_documents(lengths))
    split = open_split(store)
    order = Order(split, seed, seq_len, block, ShardIndices(store, split))
    for epoch in (0, 1, 5):
        first, last = epoch * split.num_tokens, (epoch + 1) * split.num_tokens
        touched = [set() for _ in lengths]
        for token in range(first, last):
            segment = order.between(token, token + 1).rows()[0]
            touched[segment.shard].add(token // seq_len)
        for shard in range(len(lengths)):
            assert positions_in(order.spans_of_shard(epoch, shard)) == touched[shard]


@pytest.mark.parametrize("block", [1, 2, 5])
def test_span_of_a_block_is_that_of_its_shards_and_needs_no_index(block):
    store = open_store("memory://")
    lengths = [[5, 40, 3], [17], [9, 9, 9, 200, 1], [33, 12], [8] * 12]
    write_split(store, numbered_documents(lengths))
    split = open_split(store)
    order = Order(split, 3, 16, block, ShardIndices(store, split))

    def nothing(shard):
        raise AssertionError(f"index of {shard} was asked")

    blind = Order(split, 3, 16, block, nothing)
    for epoch in (0, 2):
        by_block: dict[tuple[int, int], list] = {}
        for shard in range(len(lengths)):
            by_block.setdefault(blind.span_of_block(epoch, shard), []).extend(order.spans_of_shard(epoch, shard))
        assert len(by_block) == -(-len(lengths) // block)
        for span, spans in by_block.items():
            assert merged(as_array(spans)).tolist() == [list(span)]
