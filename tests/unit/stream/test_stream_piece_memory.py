"""The memory in which pieces are received: lent to one at a time, used again, bounded."""

from __future__ import annotations

import gc
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from stream_builders import numbered_documents, write_split

from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore
from phalanx.stream import Order, ShardIndices, WindowReader, open_split
from phalanx.stream.piece_memory import PieceMemory
from phalanx.stream.pieces import PIECE_BYTES, cut
from phalanx.stream.shards import ShardBuilder

BUFFER_BYTES = 4096


@pytest.fixture
def mapped(monkeypatch):
    """Sizes of all that is mapped anew."""
    sizes, plain = [], mmap.mmap

    def counting(file, num_bytes, *rest, **options):
        sizes.append(num_bytes)
        return plain(file, num_bytes, *rest, **options)

    monkeypatch.setattr(mmap, "mmap", counting)
    return sizes


def address(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_lent_again_only_when_its_last_view_is_gone(mapped):
    memory = PieceMemory(BUFFER_BYTES, 4)
    gc.disable()
    try:
        lent = memory.take(1000)
        where, part, tokens = address(lent), lent[10:20][2:], np.frombuffer(lent, np.uint16, 100, 8)
        assert len(lent) == 1000
        lent[:] = bytes(range(250)) * 4
        other = memory.take(1000)
        assert address(other) != where
        del lent, part
        assert memory.num_idle == 0 and tokens.view(np.uint8)[:3].tolist() == [8, 9, 10]
        del tokens
        assert memory.num_idle == 1
        assert address(memory.take(BUFFER_BYTES)) == where
    finally:
        gc.enable()
    assert mapped == [BUFFER_BYTES] * 2


def test_what_is_larger_than_a_buffer_is_not_kept(mapped):
    memory = PieceMemory(BUFFER_BYTES, 4)
    lent = memory.take(BUFFER_BYTES + 1)
    assert len(lent) == BUFFER_BYTES + 1 and not lent.readonly
    del lent
    assert memory.num_idle == 0 and mapped == [BUFFER_BYTES + 1]


def test_no_more_than_the_bound_is_kept_idle():
    memory = PieceMemory(BUFFER_BYTES, 2)
    lent = [memory.take(1) for _ in range(5)]
    lent.clear()
    assert memory.num_idle == 2


def test_threads_never_have_the_same_memory_at_once():
    memory, start = PieceMemory(BUFFER_BYTES, 8), threading.Barrier(4)

    def use(number):
        start.wait(30)
        for turn in range(2_000):
            lent = memory.take(64)
            mark = (number << 16 | turn).to_bytes(4, "big") * 16
            lent[:] = mark
            assert lent == mark
            del lent  # before the next is taken, so that no thread has two
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(4)))
    assert memory.num_idle <= 4


def test_pieces_of_a_usual_shard_have_one_size_and_nearly_fill_a_buffer():
    builder, draw = ShardBuilder("t-00000000", np.dtype(np.uint16)), np.random.default_rng(0)
    for number, length in enumerate(draw.lognormal(6.0, 1.1, 12_000).clip(20, 60_000).astype(int).tolist()):
        builder.add(str(number), np.zeros(length, np.uint16))
    cuts = cut(builder.finish().index, 2, PIECE_BYTES)
    sizes = [cuts.span(piece)[1] for piece in range(cuts.num_pieces - 1)]
    assert len(sizes) >= 3 and all(len(cuts.members(piece)) == 4 for piece in range(len(sizes)))
    assert min(sizes) > 0.9 * PIECE_BYTES and max(sizes) - min(sizes) < PIECE_BYTES // 20


def test_a_reader_over_many_epochs_maps_no_more_than_it_has_at_once(mapped):
    plain, document_bytes, cache_bytes, num_threads = open_store("memory://split"), 200, 4800, 3
    write_split(plain, numbered_documents([[document_bytes // 4] * 20] * 6))
    store, split = FaultyStore(plain), open_split(plain)
    order = Order(split, 3, 16, 2, ShardIndices(store, split))
    epochs, num_documents = 5, 120
    with WindowReader(
        store, split, order, True, cache_bytes=cache_bytes, num_threads=num_threads, reads_ahead=True
    ) as reader:
        for position in range(epochs * split.num_tokens // 16):
            reader.read(np.array([position]))
    reads = sum(call.key.endswith(".tar") for call in store.calls)
    assert reads >= (epochs - 1) * num_documents, "each piece is fetched in each epoch"
    # Those kept, one that is being let go by each thread, and those that a window needs.
    assert len(mapped) <= cache_bytes // document_bytes + num_threads + 3
