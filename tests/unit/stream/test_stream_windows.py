"""Windows against a brute-force reading, journal weights, damage, bounded memory."""

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_builders import numbered_documents, write_split

from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore, corrupt_read, on
from phalanx.stream import DamagedShard, Order, ShardIndices, WindowReader, open_split, slots
from phalanx.stream.batch import num_slots
from phalanx.stream.spans import as_array, hold

LENGTHS = [[5, 40, 3], [17], [9, 9, 9, 200, 1], [33, 12], [8] * 12]


class Reading:
    """A split on disk, its order, and what any window holds by brute force."""

    def __init__(self, folder, seq_len=16, seed=3, lengths=LENGTHS):
        self.folder = Path(folder)
        self.store = open_store(f"file://{folder}")
        if not (self.folder / "manifest.json").exists():
            write_split(self.store, numbered_documents(lengths))
        self.split, self.seq_len = open_split(self.store), seq_len
        self.order = Order(self.split, seed, seq_len, 2, ShardIndices(self.store, self.split))
        self.firsts = np.concatenate([[0], np.cumsum([n for shard in lengths for n in shard])])
        self.number = {
            (s, d): sum(len(shard) for shard in lengths[:s]) + d
            for s, shard in enumerate(lengths)
            for d in range(len(shard))
        }

    def remote(self, faults=()):
        """The same split in a store whose objects are no files here: it is read by requests."""
        self.store = FaultyStore(self.store, faults)
        return self

    def requests(self):
        """What was asked of the shards."""
        return [call.key for call in self.store.calls if call.operation == "read" and call.key.endswith(".tar")]

    def reader(self, document_mask=True, **options):
        return WindowReader(self.store, self.split, self.order, document_mask, **options)

    def expected(self, position, document_mask):
        """(tokens, targets, position_ids, document_ids) of one window, token by token."""
        start = position * self.seq_len
        rows = self.order.between(start, start + self.seq_len + 1).rows()
        stream = []
        for run, segment in enumerate(rows):
            number = self.number[segment.shard, segment.document]
            first, last = self.firsts[number], self.firsts[number + 1] - 1
            begin, _ = self.order.tokens_of(self.order.epoch_of(position), segment.shard, segment.document)
            skip = 0 if segment.starts_document else max(start - begin, 0)
            if not segment.starts_document and start < begin:
                skip = (
                    start - self.order.tokens_of(self.order.epoch_of(position) - 1, segment.shard, segment.document)[0]
                )
            stream += [(first + skip + i, first + skip + i == last, run, i) for i in range(segment.length)]
        inputs, after = stream[: self.seq_len], stream[1:]
        tokens = [t for t, _, _, _ in inputs]
        if not document_mask:
            return tokens, [t for t, _, _, _ in after], list(range(self.seq_len)), [0] * self.seq_len
        targets = [-100 if ends else t for (_, ends, _, _), (t, _, _, _) in zip(inputs, after, strict=True)]
        return tokens, targets, [i for _, _, _, i in inputs], [run for _, _, run, _ in inputs]


@pytest.fixture
def reading(tmp_path):
    return Reading(tmp_path / "split")


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("seq_len", [1, 7, 16, 64])
def test_read_every_window_of_two_epochs_equals_brute_force(tmp_path, document_mask, seq_len):
    """Cases 2 and 4: shards of any size, windows over document, shard and epoch borders."""
    reading = Reading(tmp_path / "split", seq_len)
    last = 2 * reading.split.num_tokens // seq_len
    with reading.reader(document_mask) as reader:
        batch = reader.read(np.arange(last))
        for position in range(last):
            tokens, targets, position_ids, document_ids = reading.expected(position, document_mask)
            assert batch.tokens[position].tolist() == tokens
            assert batch.targets[position].tolist() == targets
            assert batch.position_ids[position].tolist() == position_ids
            assert batch.document_ids[position].tolist() == document_ids
            assert reader.valid_targets(np.array([position])) == sum(t != -100 for t in targets)
        assert reader.valid_targets(np.arange(last)) == (batch.targets != -100).sum()


def test_read_rows_record_what_the_model_received(reading):
    with reading.reader() as reader:
        batch = reader.read(np.array([4, -1, 2]))
    rows = batch.rows
    assert rows.position.tolist() == [4, 2] and rows.weight.tolist() == [1, 1]
    for row, slot in enumerate([0, 2]):
        received = batch.tokens[slot].astype("<u4").tobytes()
        assert rows.xxh3[row] == xxhash.xxh3_64_intdigest(received)
        mine = rows.segment_window == row
        read = [(s.shard, s.member, s.offset, s.length) for s in reading.order.segments(int(rows.position[row]))]
        columns = (rows.shard, rows.member, rows.offset, rows.length)
        assert list(zip(*(column[mine].tolist() for column in columns), strict=True)) == read


def test_read_surplus_slots_hold_no_target_and_no_row(reading):
    with reading.reader() as reader:
        batch = reader.read(np.array([-1, -1]))
        assert reader.valid_targets(np.array([-1])) == 0
    assert not batch.tokens.any() and (batch.targets == -100).all()
    assert len(batch.rows.position) == len(batch.rows.shard) == 0


SHARED: dict[str, Path] = {}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4))
def test_read_after_any_relayout_continues_exactly(tmp_path_factory, legs):
    """Cases 1, 2, 3, 11 and 15: dp, local and global batch sizes change between legs; nothing repeats, nothing is
    skipped.
    """
    reading = Reading(SHARED.setdefault("folder", tmp_path_factory.mktemp("relayout") / "split"))
    position, seen = 0, []
    for dp, local, global_batch_size in legs:
        for _ in range(2):
            for rank in range(dp):
                with reading.reader(num_threads=1) as reader:
                    batch = reader.read(slots(position, global_batch_size, dp, local, rank).ravel())
                seen += list(zip(batch.rows.position.tolist(), batch.rows.xxh3.tolist(), strict=True))
            position += global_batch_size
    with reading.reader() as reader:
        rows = reader.read(np.arange(position)).rows
    assert sorted(seen) == list(zip(rows.position.tolist(), rows.xxh3.tolist(), strict=True))


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("seq_len", [7, 16, 64])
def test_resume_inside_a_packed_document_goes_on_with_its_mask_and_positions(tmp_path, document_mask, seq_len):
    """Case 2: a window that begins inside a document has its tokens, targets, positions and mask after a resume at any
    window, too: the carry is part of the position, not of the reader.
    """
    reading = Reading(tmp_path / "split", seq_len)
    last = 2 * reading.split.num_tokens // seq_len
    inside = 0
    with reading.reader(document_mask) as reader:
        whole = reader.read(np.arange(last))
    for stopped in range(last):
        again = Reading(tmp_path / "split", seq_len)
        inside += not again.order.segments(stopped)[0].starts_document
        with again.reader(document_mask, num_threads=1) as reader:
            resumed = reader.read(np.arange(stopped, min(stopped + 3, last)))
        for name in ("tokens", "targets", "position_ids", "document_ids"):
            kept = getattr(whole, name)[stopped : stopped + 3]
            assert getattr(resumed, name).tolist() == kept.tolist(), (stopped, name)
    assert inside > last // 3


@pytest.mark.parametrize("seq_len", [7, 16])
@pytest.mark.parametrize("dp, local", [(1, 1), (2, 2), (3, 1), (5, 2)])
@pytest.mark.parametrize("num_threads, reads_ahead", [(1, False), (8, True)])
def test_number_of_batches_of_an_epoch_is_exact_whatever_ranks_and_workers(
    tmp_path, seq_len, dp, local, num_threads, reads_ahead
):
    """Case 11: as many whole batches as the tokens fill, for each rank; the windows behind them begin the next batch,
    dropped by nobody.
    """
    reading, batch = Reading(tmp_path / "split", seq_len), 6
    windows = reading.split.num_tokens // seq_len
    steps, left = divmod(windows, batch)
    seen = []
    for rank in range(dp):
        with reading.reader(num_threads=num_threads, reads_ahead=reads_ahead) as reader:
            given = [reader.read(slots(step * batch, batch, dp, local, rank).ravel()) for step in range(steps + 1)]
        assert {len(each.tokens) for each in given} == {num_slots(batch, dp, local) * local}
        seen += [position for each in given[:steps] for position in each.rows.position.tolist()]
        seen += [position for position in given[steps].rows.position.tolist() if position < windows]
    assert sorted(seen) == list(range(windows)) and (steps, left) == {7: (10, 2), 16: (4, 3)}[seq_len]  # of 434 tokens


def test_read_zero_weight_windows_keep_their_place(reading):
    positions = np.arange(6)
    with reading.reader() as reader:
        plain = reader.read(positions)
        total = reader.valid_targets(positions)
    with reading.reader(zero_weight=[(2, 4)]) as reader:
        batch = reader.read(positions)
        lost = (plain.targets[2:4] != -100).sum() + (plain.targets[1, -1] != -100)
        assert reader.valid_targets(positions) == total - lost
    assert batch.rows.weight.tolist() == [1, 1, 0, 0, 1, 1] and batch.rows.position.tolist() == positions.tolist()
    assert (batch.targets[2:4] == -100).all() and not batch.tokens[2:4].any()
    for kept in (0, 1, 4, 5):
        known = slice(0, -1) if kept == 1 else slice(None)
        assert (batch.tokens[kept] == plain.tokens[kept]).all()
        assert (batch.targets[kept][known] == plain.targets[kept][known]).all()
    assert batch.targets[1, -1] == -100, "the next window is not read, not even for a target"


@pytest.mark.parametrize("document_mask", [True, False])
@settings(max_examples=20, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=6), seq_len=st.sampled_from([3, 16]))
def test_valid_targets_under_any_zero_weight_are_those_of_the_windows_read(
    tmp_path_factory, document_mask, spans, seq_len
):
    """What every rank computes for the whole batch is what the ranks together hold."""
    reading = Reading(SHARED.setdefault("weights", tmp_path_factory.mktemp("weights") / "split"), seq_len)
    taken_out = [(start, start + length) for start, length in spans]
    positions = np.arange(2 * reading.split.num_tokens // seq_len)
    with reading.reader(document_mask, zero_weight=taken_out, num_threads=1) as reader:
        targets = reader.read(positions).targets
        assert reader.valid_targets(positions) == (targets != -100).sum()
        assert reader.valid_targets(positions[::2]) == (targets[::2] != -100).sum()


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def read_all(reading, **options):
    with reading.reader(**options) as reader:
        return reader.read(np.arange(reading.split.num_tokens // reading.seq_len))


def test_read_flipped_bit_names_shard_member_offset_and_key(reading):
    """Case 5."""
    index = ShardIndices(reading.store, reading.split)(2)
    offset = int(index.member_offsets[1])
    flip(reading.folder / "t-00000002.tar", offset + 5)
    with pytest.raises(DamagedShard) as error:
        read_all(reading)
    found = error.value
    assert (found.shard, found.member, found.offset, found.key) == (2, 1, offset, "t-00000002.tar")
    assert f"member 1 at byte {offset} of {reading.store.url}/t-00000002.tar: " in str(found)


def test_read_damaged_member_taken_out_by_the_journal_goes_on(reading):
    """Case 5: the windows that the order names for a member are enough to train past its damage."""
    good = read_all(reading)
    flip(reading.folder / "t-00000002.tar", int(ShardIndices(reading.store, reading.split)(2).member_offsets[1]))
    lost = reading.order.positions_reading(0, 2, 1)
    batch = read_all(reading, zero_weight=[(int(p), int(p) + 1) for p in lost])
    kept = np.setdiff1d(np.arange(len(good.tokens)), lost)
    assert len(kept) and (batch.tokens[kept] == good.tokens[kept]).all()


@pytest.mark.parametrize("objects", ["tar", "index", "both"])
def test_read_of_a_lost_shard_taken_out_by_the_journal_reads_all_the_rest(reading, objects):
    """Without its tar, the windows that read it; without its index, those of its block, whose segments nobody knows."""
    good, shard = read_all(reading), 2
    lost_index = objects != "tar"
    span = reading.order.span_of_block(0, shard)
    lost = as_array([span]) if lost_index else reading.order.spans_of_shard(0, shard)
    for suffix in {"tar": ["tar"], "index": ["index.safetensors"], "both": ["tar", "index.safetensors"]}[objects]:
        (reading.folder / f"t-{shard:08d}.{suffix}").unlink()
    fresh = Reading(reading.folder)
    batch = read_all(fresh, zero_weight=lost.tolist())
    is_lost = hold(lost, np.arange(len(good.tokens)))
    assert is_lost.any() and not is_lost.all()
    assert (batch.rows.weight == ~is_lost).all() and not batch.tokens[is_lost].any()
    assert (batch.tokens[~is_lost] == good.tokens[~is_lost]).all()
    told = np.bincount(batch.rows.segment_window, minlength=len(is_lost)) > 0
    assert told[~is_lost].all() and told[is_lost].all() == (not lost_index)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda tar: tar.write_bytes(tar.read_bytes()[:700]), "the object has 700 bytes"),
        (lambda tar: tar.write_bytes(bytes(len(tar.read_bytes()))), "digest"),
        (lambda tar: tar.unlink(), "missing"),
    ],
)
def test_read_cut_zeroed_or_missing_shard_is_damage(reading, damage, why):
    """Cases 5 and 6: never an empty or a short shard."""
    damage(reading.folder / "t-00000003.tar")
    with pytest.raises(DamagedShard, match=why) as error:
        read_all(reading)
    assert error.value.name == "t-00000003"


def test_read_damaged_index_is_named(reading):
    flip(reading.folder / "t-00000001.index.safetensors", 100)
    with pytest.raises(DamagedShard) as error:
        read_all(reading)
    assert f"index at byte 0 of {reading.store.url}/t-00000001.index.safetensors: " in str(error.value)


def test_read_transient_wrong_bytes_are_fetched_again(reading):
    """Case 5: re-fetched once."""
    good = read_all(reading)
    reading.remote([corrupt_read(on("read", f"t-{shard:08d}.tar", nth=0), 5) for shard in range(len(LENGTHS))])
    assert (read_all(reading).tokens == good.tokens).all()
    assert sorted(reading.requests()) == sorted(2 * [f"t-{shard:08d}.tar" for shard in range(len(LENGTHS))])


def test_read_small_cache_stays_within_its_bound_and_gives_the_same(reading):
    """Case 10: eviction never races a reader; a member larger than the cache is still served."""
    good = read_all(reading)
    with reading.reader(cache_bytes=300, num_threads=2) as reader:
        for position in range(len(good.tokens)):
            assert (reader.read(np.array([position])).tokens[0] == good.tokens[position]).all()
            largest = 4 * 200
            assert reader._pieces.kept_bytes <= max(300, largest)


@pytest.mark.parametrize(("cache_bytes", "requests"), [(256 << 20, len(LENGTHS)), (4800, 8)])
def test_read_whole_epoch_fetches_each_member_once_and_adjacent_ones_together(reading, cache_bytes, requests):
    """Pieces of 300 bytes hold one member or two, those of the usual size a whole shard."""
    read_all(reading.remote(), cache_bytes=cache_bytes)
    assert len(reading.requests()) == requests


def test_prefetch_of_kept_members_asks_for_no_index(reading):
    asked = []
    indices = ShardIndices(reading.store, reading.split)

    def index_of(shard):
        asked.append(shard)
        return indices(shard)

    order = Order(reading.split, 3, reading.seq_len, 2, index_of)
    positions = np.arange(6)
    with WindowReader(reading.store, reading.split, order, True) as reader:
        reader.read(positions)
        assert asked
        asked.clear()
        reader.prefetch(positions)
        assert asked == []


@pytest.mark.parametrize(("cache_bytes", "warnings"), [(1295, 1), (1296, 0)])
def test_reader_whose_cache_is_smaller_than_a_block_warns(reading, caplog, cache_bytes, warnings):
    """The two largest shards hold 228 and 96 tokens of 4 bytes each."""
    with reading.reader(cache_bytes=cache_bytes):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
