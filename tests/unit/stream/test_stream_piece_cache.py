"""Tokens of many segments out of the pieces in memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from stream_builders import numbered_documents, write_split

from phalanx.objects import open_store
from phalanx.stream import Order, ShardIndices, open_split
from phalanx.stream.piece_cache import PieceCache
from phalanx.stream.pieces import SplitPieces

COLLECTOR_THRESHOLD = 700  # the interpreter's own


@pytest.fixture
def split():
    """3,000 documents of 1 to 3 tokens in three shards: what is read in order makes nearly as many runs."""
    store = open_store("memory://split")
    lengths = np.random.default_rng(0).integers(1, 4, 3_000).reshape(3, 1_000)
    write_split(store, numbered_documents(lengths.tolist()))
    return store, open_split(store)


@pytest.mark.parametrize("num_tokens", [1, 300, 600, 1_300, 5_000])
def test_tokens_of_many_runs_are_those_of_the_documents(split, num_tokens):
    store, opened = split
    order = Order(opened, 3, 8, 3, ShardIndices(store, opened))
    documents = [
        np.concatenate(SplitPieces(store, opened, order.index_of).tokens(shard, piece))
        for shard in range(3)
        for piece in range(SplitPieces(store, opened, order.index_of).cut(shard).num_pieces)
    ]
    assert (np.concatenate(documents) == np.arange(opened.num_tokens)).all()
    segments = order.between(0, num_tokens)
    firsts = np.concatenate([[0], np.cumsum(opened.shard_tokens)])
    expected = []
    for segment in segments.rows():
        before = order.index_of(segment.shard).member_tokens()[: segment.member].sum()
        first = firsts[segment.shard] + before + segment.offset
        expected += range(first, first + segment.length)
    cache = PieceCache([SplitPieces(store, opened, order.index_of)], 1 << 20, 2, 60)
    try:
        assert cache.gather(cache.locate(0, segments)).tolist() == expected
    finally:
        cache.close()


def test_gathering_more_runs_than_the_collector_lets_pass_does_not_call_it(split):
    store, opened = split
    order = Order(opened, 3, 8, 3, ShardIndices(store, opened))
    cache = PieceCache([SplitPieces(store, opened, order.index_of)], 1 << 20, 1, 60)
    collections = []

    def note(phase, info):
        collections.append((phase, info))

    threshold = gc.get_threshold()
    try:
        located = cache.locate(0, order.between(0, 5_000))
        assert len(located.run_pieces) > 3 * COLLECTOR_THRESHOLD
        cache.gather(located)  # the pieces are in memory
        gc.collect()
        gc.set_threshold(COLLECTOR_THRESHOLD, *threshold[1:])
        gc.callbacks.append(note)
        cache.gather(located)
    finally:
        if note in gc.callbacks:
            gc.callbacks.remove(note)
        gc.set_threshold(*threshold)
        cache.close()
    assert not collections
