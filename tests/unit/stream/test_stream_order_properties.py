"""What the order promises, for any dataset, layout and reader: each token once, wherever and in whatever order it is
asked for, and back.
"""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_builders import numbered_documents, write_split

from phalanx.core.philox import LARGEST_SORTED
from phalanx.objects import open_store
from phalanx.stream import Order, ShardIndex, ShardIndices, WindowReader, num_slots, open_split, slots
from phalanx.stream.recent import Recent
from phalanx.stream.segments import NO_SEGMENTS

corpora = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=7)
shapes = {"seed": st.integers(0, 99), "seq_len": st.integers(1, 70), "block_shards": st.integers(1, 4)}
layouts = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(1, 3))


@dataclass
class Totals:
    shard_tokens: np.ndarray


def index_of(lengths):
    """An index with one document a member."""
    ones = np.ones(len(lengths))
    return ShardIndex(np.array(lengths, np.uint32), ones.astype(np.uint32), *2 * [np.zeros(len(lengths), np.uint64)])


def order_of(lengths, seed=0, seq_len=8, block_shards=2):
    totals = Totals(np.array([sum(shard) for shard in lengths], dtype=np.int64))
    return Order(totals, seed, seq_len, block_shards, lambda shard: index_of(lengths[shard]))


def tokens_read(segments):
    """(shard, document, token of the document) of every token; a member is a document here."""
    rows = segments.rows()
    return [(s.shard, s.document, s.offset + k) for s in rows for k in range(s.length)]


def all_tokens(lengths):
    return [(s, d, k) for s, shard in enumerate(lengths) for d, length in enumerate(shard) for k in range(length)]


@settings(max_examples=60, deadline=None)
@given(lengths=corpora, layout=layouts, **shapes)
def test_order_ranks_of_any_layout_are_disjoint_and_together_the_epochs(lengths, layout, seed, seq_len, block_shards):
    """Cases 1, 4, 11 and 12. Each rank has an order of its own, as each process has."""
    dp, local, global_batch, multiple_of = layout
    order = order_of(lengths, seed, seq_len, block_shards)
    steps = -(-3 * order.epoch_tokens // (seq_len * global_batch))
    read, counts = {}, set()
    for rank in range(dp):
        own = order_of(lengths, seed, seq_len, block_shards)
        for step in range(steps):
            positions = slots(step * global_batch, global_batch, dp, local, rank, multiple_of)
            counts.add(positions.shape)
            for position in positions[positions >= 0].tolist():
                assert position not in read
                read[position] = tokens_read(own.window(position))
    assert sorted(read) == list(range(steps * global_batch))
    assert counts == {(num_slots(global_batch, dp, local, multiple_of), local)}
    stream = [token for position in sorted(read) for token in read[position]]
    for epoch in range(3):
        part = stream[epoch * order.epoch_tokens : (epoch + 1) * order.epoch_tokens]
        assert sorted(part) == all_tokens(lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=corpora, data=st.data(), **shapes)
def test_order_many_ranges_equal_one_after_the_other(lengths, data, seed, seq_len, block_shards):
    order = order_of(lengths, seed, seq_len, block_shards)
    ranges = data.draw(st.lists(st.tuples(st.integers(0, 3 * order.epoch_tokens), st.integers(1, 40)), max_size=12))
    starts, lengths_ = np.array(ranges, np.int64).reshape(-1, 2).T
    segments, range_of = order.between_many(starts, starts + lengths_)
    for number, (start, length) in enumerate(ranges):
        mine = range_of == number
        for column in fields(segments):
            single = getattr(order.between(start, start + length), column.name)
            assert getattr(segments, column.name)[mine].tolist() == single.tolist()
    assert (np.diff(range_of) >= 0).all()
    assert order.between(7, 7) is NO_SEGMENTS


@settings(max_examples=60, deadline=None)
@given(lengths=corpora, data=st.data(), **shapes)
def test_order_inverse_of_the_inverse_is_the_identity(lengths, data, seed, seq_len, block_shards):
    """token of the stream -> (epoch, shard, document, token) -> token, and the other way."""
    order = order_of(lengths, seed, seq_len, block_shards)
    token = data.draw(st.integers(0, 4 * order.epoch_tokens - 1))
    epoch, position = token // order.epoch_tokens, token // seq_len
    (found,) = order.between(token, token + 1).rows()
    start, stop = order.tokens_of(epoch, found.shard, found.document)
    assert start <= token < stop and token - start == found.offset
    assert (found.starts_document, found.ends_document) == (token == start, token == stop - 1)
    assert position in order.positions_of(epoch, found.shard, found.document)
    shard = data.draw(st.integers(0, len(lengths) - 1))
    document = data.draw(st.integers(0, len(lengths[shard]) - 1))
    (back,) = order.between(*order.tokens_of(epoch, shard, document)).rows()
    assert (back.shard, back.document, back.length) == (shard, document, lengths[shard][document])
    windows = {p for p in range(order.epoch_tokens * 5 // seq_len + 1) if (shard, document) in documents(order, p)}
    assert windows >= set(order.positions_of(epoch, shard, document))


def documents(order, position):
    return {(segment.shard, segment.document) for segment in order.segments(position)}


def test_order_threads_that_share_it_read_the_same_whatever_comes_first():
    """Case 11: workers are threads; few blocks are kept, so they push each other's out."""
    lengths = [[3 + (7 * s + 5 * d) % 11 for d in range(9)] for s in range(23)]
    alone, shared = order_of(lengths, 4, 16, 3), order_of(lengths, 4, 16, 3)
    positions = np.random.default_rng(1).permutation(2 * alone.epoch_tokens // 16)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda position: shared.segments(int(position)), positions))
    assert found == [alone.segments(int(position)) for position in positions]


def test_recent_making_one_keeps_nobody_waiting_who_asks_for_another():
    recent, may_end, begun = Recent[int](3), threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert may_end.wait(30)
        return 1

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(recent.get, "slow", slow) for _ in range(2)]
        assert begun.wait(30)
        assert recent.get("other", lambda: 2) == 2
        may_end.set()
        assert [each.result(30) for each in waiting] == [1, 1]


def test_recent_failure_is_told_and_tried_again_and_the_oldest_falls_out():
    recent, made = Recent[int](2), []

    def fails():
        raise ValueError("not now")

    def make(value):
        made.append(value)
        return value

    with pytest.raises(ValueError, match="not now"):
        recent.get(1, fails)
    for key in (1, 2, 1, 3, 1, 2):
        assert recent.get(key, lambda key=key: make(key)) == key
    assert made == [1, 2, 3, 2]


def test_order_of_many_shards_is_each_token_once_and_frozen():
    """More shards than are sorted, one document each."""
    lengths = np.random.default_rng(3).integers(1, 50, LARGEST_SORTED + 4464)
    indices = {length: index_of([length]) for length in range(1, 50)}
    order = Order(Totals(lengths), 5, 64, 512, lambda shard: indices[int(lengths[shard])])
    segments = order.between(0, order.epoch_tokens)
    assert segments.starts_document.all() and segments.ends_document.all()
    assert (np.sort(segments.shard) == np.arange(len(lengths))).all()
    assert (segments.length == lengths[segments.shard]).all()
    assert hashlib.sha256(segments.shard.astype("<i8").tobytes()).hexdigest() == GOLDEN_LARGE
    for shard in (0, 40_000, len(lengths) - 1):
        start, stop = order.tokens_of(1, shard, 0)
        assert stop - start == lengths[shard] and order.between(start, stop).shard.tolist() == [shard]
        assert start - order.epoch_tokens != order.tokens_of(0, shard, 0)[0]


GOLDEN_LARGE = "351621343f98856e4731c4c24ba0d6c86595318236137474fce231da567e1b65"

SHARED: dict[str, Path] = {}
LENGTHS = [[5, 40, 3], [17], [9, 9, 9, 200, 1], [33, 12], [8] * 12]


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=4),
    since=st.integers(0, 40),
    seq_len=st.sampled_from([7, 16]),
)
def test_order_windows_taken_out_since_a_position_move_nothing(tmp_path_factory, spans, since, seq_len):
    """A change of the journal holds from its position: what lies before is as it was, what follows stays in place."""
    folder = SHARED.setdefault("folder", tmp_path_factory.mktemp("weights") / "split")
    store = open_store(f"file://{folder}")
    if not folder.exists():
        write_split(store, numbered_documents(LENGTHS))
    split = open_split(store)
    order = Order(split, 3, seq_len, 2, ShardIndices(store, split))
    positions = np.arange(2 * split.num_tokens // seq_len)
    taken_out = [(since + start, since + start + length) for start, length in spans]
    with WindowReader(store, split, order, True, num_threads=1) as reader:
        plain = reader.read(positions)
        before = reader.read(positions[:since])
    with WindowReader(store, split, order, True, num_threads=1, zero_weight=taken_out) as reader:
        after = reader.read(positions[since:])
    tokens, targets = (
        np.concatenate([getattr(part, name) for part in (before, after)]) for name in ("tokens", "targets")
    )
    *flags, _ = is_out = [any(start <= p < stop for start, stop in taken_out) for p in range(len(positions) + 1)]
    out = np.array(flags, bool)
    assert (tokens[~out] == plain.tokens[~out]).all() and not tokens[out].any() and (targets[out] == -100).all()
    kept = targets[~out] != -100
    assert (targets[~out][kept] == plain.targets[~out][kept]).all()
    differs = np.argwhere(targets[~out] != plain.targets[~out])
    assert all(column == seq_len - 1 and is_out[positions[~out][row] + 1] for row, column in differs.tolist())
