"""The order: against a brute-force concatenation, by hypothesis, with its inverse, and frozen by a golden."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_builders import numbered_documents

from phalanx.stream.order import Order
from phalanx.stream.shards import ShardBuilder, token_dtype


@dataclass
class Totals:
    shard_tokens: np.ndarray


class Corpus:
    """Shards whose tokens are all different, with their indices."""

    def __init__(self, lengths, member_bytes=64):
        self.documents = numbered_documents(lengths)
        self.lengths = lengths
        self.built = []
        for number, shard in enumerate(self.documents):
            builder = ShardBuilder(f"t-{number}", token_dtype(1 << 17), member_bytes)
            for document in shard:
                builder.add("x", document)
            self.built.append(builder.finish())

    def order(self, seed=0, seq_len=8, block_shards=2, index_of=None):
        totals = Totals(np.array([sum(shard) for shard in self.lengths], dtype=np.int64))
        return Order(totals, seed, seq_len, block_shards, index_of or (lambda shard: self.built[shard].index))

    def tokens(self, segment):
        """Tokens of a segment, looked up by shard, member and offset."""
        index = self.built[segment.shard].index
        first = index.member_first_documents()[segment.member]
        start = sum(self.lengths[segment.shard][:first]) + segment.offset
        return np.concatenate(self.documents[segment.shard])[start : start + segment.length]

    def stream(self, order, epochs):
        """The endless stream by brute force: every document of every epoch at the place that the inverse gives it."""
        total = sum(sum(shard) for shard in self.lengths)
        out = np.full(total * epochs, -1)
        for epoch in range(epochs):
            for shard, documents in enumerate(self.documents):
                for number, document in enumerate(documents):
                    start, stop = order.tokens_of(epoch, shard, number)
                    assert stop - start == len(document) and (out[start:stop] == -1).all()
                    out[start:stop] = document
        return out


corpora = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=7)
shapes = {"seed": st.integers(0, 99), "seq_len": st.integers(1, 70), "block_shards": st.integers(1, 4)}


@settings(max_examples=60, deadline=None)
@given(lengths=corpora, **shapes)
def test_order_windows_equal_the_brute_force_stream(lengths, seed, seq_len, block_shards):
    """Cases 1, 2 and 11: every token of an epoch once, windows disjoint, the carry over documents and epochs part of
    the position.
    """
    corpus = Corpus(lengths)
    order, epochs = corpus.order(seed, seq_len, block_shards), 3
    stream = corpus.stream(corpus.order(seed, seq_len, block_shards), epochs)
    total = len(stream) // epochs
    for epoch in range(epochs):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))
    for position in range(len(stream) // seq_len):
        segments = order.segments(position)
        read = np.concatenate([corpus.tokens(segment) for segment in segments])
        assert read.tolist() == stream[position * seq_len : (position + 1) * seq_len].tolist()
        for segment in segments:
            assert position in window_range(order, segment, position)


def window_range(order, segment, position):
    epochs = {order.epoch_of(position), (position * order.seq_len + order.seq_len - 1) // order.epoch_tokens}
    spans = [order.positions_of(e, segment.shard, segment.document) for e in range(min(epochs), max(epochs) + 1)]
    return {p for span in spans for p in span}


@settings(max_examples=40, deadline=None)
@given(lengths=corpora, **shapes)
def test_order_document_windows_are_exactly_those_that_read_it(lengths, seed, seq_len, block_shards):
    """The inverse both ways: (epoch, shard, document) -> windows -> segments and back."""
    order = Corpus(lengths).order(seed, seq_len, block_shards)
    epoch = 1
    for shard, documents in enumerate(lengths):
        for number, length in enumerate(documents):
            start, stop = order.tokens_of(epoch, shard, number)
            (segment,) = order.between(start, stop).rows()
            assert (segment.shard, segment.document, segment.length) == (shard, number, length)
            assert segment.starts_document and segment.ends_document
            for position in order.positions_of(epoch, shard, number):
                assert any(s.shard == shard and s.document == number for s in order.segments(position))


@settings(max_examples=40, deadline=None)
@given(lengths=corpora, start=st.integers(0, 200), length=st.integers(0, 200), **shapes)
def test_order_count_document_ends_equals_the_segments(lengths, start, length, seed, seq_len, block_shards):
    order = Corpus(lengths).order(seed, seq_len, block_shards)
    counted = int(order.between(start, start + length).ends_document.sum()) if length else 0
    assert order.count_document_ends(start, start + length) == counted


def test_order_member_damage_names_every_window_that_needs_it():
    corpus = Corpus([[5, 9, 30, 2], [7, 7, 7], [40, 3]])
    order = corpus.order(seq_len=8)
    last = 2 * order.epoch_tokens // order.seq_len
    for shard, built in enumerate(corpus.built):
        for member in range(built.index.num_members):
            needing = set()
            for position in range(order.epoch_tokens // order.seq_len - 1):
                window = order.between(position * 8, (position + 1) * 8 + 1)
                if ((window.shard == shard) & (window.member == member)).any():
                    needing.add(position)
            found = set(order.positions_reading(0, shard, member).tolist())
            assert needing <= found and max(found) < last
            assert all(abs(extra - order.epoch_tokens // 8) <= 1 for extra in found - needing)


def test_order_differs_by_epoch_and_seed_and_is_the_same_everywhere():
    """Case 12: golden; the order is a function of the manifest, the seed and the window length alone."""
    corpus = Corpus([[3 + (s * 7 + d * 5) % 11 for d in range(20)] for s in range(9)])
    streams = {seed: corpus.stream(corpus.order(seed, 16, 4), 2) for seed in (0, 1)}
    half = len(streams[0]) // 2
    assert (streams[0][:half] != streams[0][half:]).any() and (streams[0] != streams[1]).any()
    assert hashlib.sha256(streams[0].astype("<i8").tobytes()).hexdigest() == GOLDEN_ORDER


GOLDEN_ORDER = "2b74bd4e3c43b73a19938ed39bb761377b47ae3a159d242947abbd3183271fb2"


def test_order_opens_only_the_blocks_it_needs():
    """Two levels: a position far into the data costs the indices of one block."""
    corpus, opened = Corpus([[10] * 10] * 40), []

    def index_of(shard):
        opened.append(shard)
        return corpus.built[shard].index

    order = corpus.order(seq_len=10, block_shards=4, index_of=index_of)
    order.segments(10 * 40 * 3 + 17)
    assert len(opened) == 4
    order.segments(10 * 40 * 3 + 18)
    assert len(opened) == 4


def test_order_million_shards_keep_six_bytes_each():
    totals = Totals(np.full(1_000_000, 10_000_000, dtype=np.int64))
    corpus = Corpus([[10_000_000 // 100_000] * 4])
    order = Order(totals, 0, 4096, 4, lambda _: corpus.built[0].index)
    plan = order._epoch(0)
    assert plan.shards.nbytes + plan.starts.nbytes == pytest.approx(6_000_000, rel=1e-5)
