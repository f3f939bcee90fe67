"""The reader beyond single windows: several batches at once, several sources, blocks ahead, a node's cache, faults."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_builders import numbered_documents, write_split

from phalanx.core.errors import OutsideError
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore, corrupt_read, delay, on, short_read
from phalanx.stream import DamagedShard, Order, ShardIndices, WindowReader, open_split, slots
from phalanx.stream.mixture import Change, Mixture
from phalanx.stream.node_cache import NodeCache
from phalanx.stream.sources import Source
from phalanx.stream.view import View
from phalanx.stream.windows import MixtureReader

LENGTHS = [[5, 40, 3], [17, 60], [9, 9, 9, 200, 1], [33, 12], [8] * 12, [70, 2]]
SEQ_LEN, NUM_SHARDS = 16, len(LENGTHS)


class Remote:
    """A split that is read by requests."""

    def __init__(self, lengths=LENGTHS, faults=(), seed=3):
        plain = open_store("memory://split")
        write_split(plain, numbered_documents(lengths))
        self.store, self.split = FaultyStore(plain, faults), open_split(plain)
        self.order = Order(self.split, seed, SEQ_LEN, 2, ShardIndices(self.store, self.split))
        self.last = self.split.num_tokens // SEQ_LEN

    def reader(self, **options):
        return WindowReader(self.store, self.split, self.order, True, **options)

    def requests(self):
        return [call.key for call in list(self.store.calls) if call.key.endswith(".tar")]

    def source(self, name, first_shard):
        return Source(name, self.store, self.split, self.order, first_shard)


def assert_equal(one, other):
    for name in ("tokens", "targets", "position_ids", "document_ids"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    for name in one.rows.__dataclass_fields__:
        assert getattr(one.rows, name).tolist() == getattr(other.rows, name).tolist(), name


def wait_for(condition, deadline_s=30):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def remote():
    return Remote()


@settings(max_examples=40, deadline=None)
@given(
    dp=st.integers(1, 3),
    local=st.integers(1, 3),
    global_batch_size=st.integers(1, 7),
    steps=st.integers(1, 20),
    zero_weight=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=4),
    document_mask=st.booleans(),
)
def test_batches_of_any_layout_are_those_that_are_read_one_by_one(
    remote, dp, local, global_batch_size, steps, zero_weight, document_mask
):
    batches = [slots(step * global_batch_size, global_batch_size, dp, local, dp - 1).ravel() for step in range(steps)]
    spans = [(start, start + length) for start, length in zero_weight]
    with WindowReader(remote.store, remote.split, remote.order, document_mask, zero_weight=spans) as reader:
        together = list(reader.batches(iter(batches)))
        assert len(together) == steps
        for positions, batch in zip(batches, together, strict=True):
            assert_equal(batch, reader.read(positions))


def test_batches_before_a_damaged_one_are_given_and_it_alone_is_refused(remote):
    good = [batch.tokens for batch in remote.reader().batches(np.arange(k, k + 1) for k in range(remote.last))]
    broken = Remote(faults=[corrupt_read(on("read", "t-00000002.tar"), 3)])
    given: list[np.ndarray] = []
    with broken.reader() as reader, pytest.raises(DamagedShard) as damage:
        given.extend(batch.tokens for batch in reader.batches(np.arange(k, k + 1) for k in range(remote.last)))
    needs = broken.order.between(len(given) * SEQ_LEN, (len(given) + 1) * SEQ_LEN + 1)
    assert damage.value.shard == 2 and 2 in needs.shard.tolist()
    assert len(given) > 0 and all((one == other).all() for one, other in zip(given, good, strict=False))


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any),
    lost=st.lists(st.integers(0, 20), max_size=3),
    start=st.integers(0, 40),
    count=st.integers(1, 30),
)
def test_read_of_a_mixture_gives_each_source_its_own_next_window(remote, weights, lost, start, count):
    """The last target of a window is the next token of the same source, whatever lies between them."""
    other = Remote([[30, 30], [7, 90, 11], [64]], seed=5)
    sources = [remote.source("a", 0), other.source("b", NUM_SHARDS)]
    mixture = Mixture([Change(0, tuple(map(Fraction, weights)), 100)])
    positions = np.arange(start, start + count)
    source_of, window_of = mixture.place(positions)
    spans = {1: [(window, window + 1) for window in lost]}
    with (
        MixtureReader(sources, View(mixture, (), spans), True) as reader,
        remote.reader() as first,
        other.reader(zero_weight=spans[1]) as second,
    ):
        batch = reader.read(positions)
        assert reader.valid_targets(positions) == (batch.targets != -100).sum()
        for row, (source, window) in enumerate(zip(source_of.tolist(), window_of.tolist(), strict=True)):
            alone = (first, second)[source].read(np.array([window]))
            for name in ("tokens", "targets", "position_ids", "document_ids"):
                assert getattr(batch, name)[row].tolist() == getattr(alone, name)[0].tolist()
            mine = batch.rows.segment_window == row
            assert batch.rows.xxh3[row] == alone.rows.xxh3[0] and batch.rows.weight[row] == alone.rows.weight[0]
            assert batch.rows.shard[mine].tolist() == (alone.rows.shard + source * NUM_SHARDS).tolist()
            assert batch.rows.offset[mine].tolist() == alone.rows.offset.tolist()


def test_read_ahead_fetches_the_rest_of_a_block_and_the_next_one_and_no_more():
    remote = Remote()
    with remote.reader(reads_ahead=True) as reader:
        reader.read(np.array([0]))
        shards = list(dict.fromkeys(remote.order.between(0, remote.order.epoch_tokens).shard.tolist()))
        two_blocks = {f"t-{shard:08d}.tar" for shard in shards[:4]}
        wait_for(lambda: set(remote.requests()) >= two_blocks)
        reader.read(np.array([1]))
        assert len(remote.requests()) <= 5, "the window that ends the second block may begin the third one"
        reader.read(np.arange(remote.last))
        wait_for(lambda: len(set(remote.requests())) == NUM_SHARDS)
    assert len(remote.requests()) == NUM_SHARDS


def test_read_ahead_stays_within_the_bound_of_memory():
    remote = Remote()
    with remote.reader(reads_ahead=True, cache_bytes=900) as reader:
        for position in range(remote.last):
            reader.read(np.array([position]))
            assert reader._pieces.kept_bytes <= 900


def test_read_ahead_of_a_damaged_block_fails_only_when_it_is_read():
    remote = Remote()
    shards = list(dict.fromkeys(remote.order.between(0, remote.order.epoch_tokens).shard.tolist()))
    broken = Remote(faults=[corrupt_read(on("read", f"t-{shards[2]:08d}"), 9)])
    block_end = broken.order.span_of_block(0, shards[0])[1] - 1
    with broken.reader(reads_ahead=True) as reader:
        for position in range(block_end):
            reader.read(np.array([position]))
        with pytest.raises(DamagedShard):
            reader.read(np.arange(block_end, remote.last))


def test_ranks_of_a_node_share_what_one_of_them_fetched(tmp_path):
    remote, again = Remote(), Remote()
    cache = NodeCache(tmp_path, 1 << 20)
    with remote.reader(cache=cache) as reader:
        good = reader.read(np.arange(remote.last))
    with again.reader(cache=NodeCache(tmp_path, 1 << 20)) as reader:
        assert_equal(reader.read(np.arange(remote.last)), good)
    assert len(remote.requests()) == NUM_SHARDS and again.requests() == []


def test_a_cached_piece_with_wrong_bytes_is_fetched_anew_and_is_no_damage(tmp_path):
    remote = Remote()
    with remote.reader(cache=NodeCache(tmp_path, 1 << 20)) as reader:
        good = reader.read(np.arange(remote.last))
    for piece in tmp_path.iterdir():
        data = bytearray(piece.read_bytes())
        data[0] ^= 1
        piece.write_bytes(data)
    with remote.reader(cache=NodeCache(tmp_path, 1 << 20)) as reader:
        assert_equal(reader.read(np.arange(remote.last)), good)
    assert len(remote.requests()) == 2 * NUM_SHARDS


def test_eviction_under_a_reader_costs_requests_and_nothing_else(tmp_path):
    remote = Remote()
    with remote.reader() as reader:
        good = reader.read(np.arange(remote.last))
    with remote.reader(cache=NodeCache(tmp_path, 1000), cache_bytes=1600) as reader:
        for position in range(remote.last):
            assert reader.read(np.array([position])).tokens[0].tolist() == good.tokens[position].tolist()
            for piece in list(tmp_path.iterdir())[::2]:
                piece.unlink(missing_ok=True)
    assert sum(piece.stat().st_size for piece in tmp_path.iterdir()) <= 1000


def test_read_of_a_short_answer_is_found_by_its_digest_and_asked_again(remote):
    """A client that breaks its promise must not cost a token."""
    with remote.reader() as reader:
        good = reader.read(np.arange(remote.last))
    broken = Remote(faults=[short_read(on("read", f"t-{shard:08d}.tar", nth=0), 30) for shard in range(NUM_SHARDS)])
    with broken.reader() as reader:
        assert_equal(reader.read(np.arange(remote.last)), good)


def test_read_never_asks_what_is_there():
    """Listings and their caches say nothing that a reader may trust: names come from the manifest."""
    remote = Remote()
    with remote.reader(reads_ahead=True) as reader:
        reader.read(np.arange(remote.last))
    assert {call.operation for call in remote.store.calls} == {"read"}


def test_read_that_never_ends_is_an_error_at_the_deadline():
    go_on = threading.Event()
    remote = Remote(faults=[delay(on("read", ".tar"), go_on.wait)])
    reader = remote.reader(deadline_s=0.2)
    with pytest.raises(OutsideError, match=r"reading memory://split took longer than 0\.2 s"):
        reader.read(np.array([0]))
    go_on.set()
    reader.close()


def test_reader_in_a_child_of_its_process_is_refused_at_once(remote):
    """Threads don't come along: without the check the child would wait for ever."""
    reader = remote.reader()
    child = os.fork()
    if child == 0:
        try:
            reader.read(np.array([0]))
        except AssertionError:
            os._exit(7)
        os._exit(1)
    reader.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_pieces_that_are_let_go_are_gone_at_once():
    """Not only when garbage is collected: a reader's memory must not depend on when that is."""
    remote = Remote()
    gc.disable()
    try:
        with remote.reader(cache_bytes=900) as reader:
            alive = []
            for position in range(remote.last):
                reader.read(np.array([position]))
                alive += [weakref.ref(piece) for piece in reader._pieces._kept.values()]
            kept = {id(piece) for piece in reader._pieces._kept.values()}
            lost = [ref for ref in alive if (piece := ref()) is not None and id(piece) not in kept]
            assert len(set(map(id, alive))) > len(kept) and not lost
    finally:
        gc.enable()
