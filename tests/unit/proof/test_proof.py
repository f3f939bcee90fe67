"""The proof holds for an honest run with restarts, relayouts and zombies, and fails, naming the place, for each single
lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.core.digest import digest_of, sha256
from phalanx.data.proof import MAX_NAMED, Proof, ShardCache, Spans, prove
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest, ObjectRef, WindowRows, journal_digest
from phalanx.objects import open_store
from phalanx.stream.order import SegmentColumns

SEQ_LEN, BATCH = 8, 6
IDENTITY = sha256(b"identity")
SHARD_MEMBERS = {0: (50, 31), 1: (7,), 2: (40, 25, 3)}
TOKENS = {
    (shard, member): np.random.default_rng([shard, member]).integers(0, 60_000, count).astype(np.uint16)
    for shard, counts in SHARD_MEMBERS.items()
    for member, count in enumerate(counts)
}
EPOCH_TOKENS = sum(sum(counts) for counts in SHARD_MEMBERS.values())
Change = Callable[[WindowRows], WindowRows]


def segments_between(start: int, stop: int) -> list[tuple[int, int, int, int]]:
    """Segments of the grid's tokens [start, stop): members in turn, the order turned round in every second epoch."""
    segments, at = [], 0
    for epoch in range(stop // EPOCH_TOKENS + 1):
        for place in sorted(TOKENS, reverse=bool(epoch % 2)):
            first, last = max(start, at), min(stop, at + len(TOKENS[place]))
            if first < last:
                segments.append((*place, first - at, last - first))
            at += len(TOKENS[place])
    return segments


def read_windows(positions: list[int]) -> WindowRows:
    segments = [segments_between(p * SEQ_LEN, (p + 1) * SEQ_LEN) for p in positions]
    held = [np.concatenate([TOKENS[s, m][o : o + n] for s, m, o, n in window]) for window in segments]
    flat = np.array([segment for window in segments for segment in window], np.int64).reshape(-1, 4)
    position = np.array(positions, np.int64)
    return WindowRows(
        step=position // BATCH + 1,
        position=position,
        weight=np.ones(len(positions), np.float32),
        xxh3=np.array([xxhash.xxh3_64_intdigest(w.astype("<u4").tobytes()) for w in held], np.uint64),
        segment_window=np.repeat(np.arange(len(positions)), [len(window) for window in segments]),
        shard=flat[:, 0],
        member=flat[:, 1],
        offset=flat[:, 2],
        length=flat[:, 3],
    )


class Run:
    """A job that trains honestly, unless `change` is given, which gets the rows of (attempt, rank) 1, 0 of the first
    save.
    """

    def __init__(self, change: Change | None = None) -> None:
        self.lineage = Lineage(open_store("memory://"))
        self._change = change

    def open(self, *avoid: CheckpointRef) -> int:
        return self.lineage.open_attempt(
            code_digest=IDENTITY, identity_digest=IDENTITY, placement={}, avoid=avoid
        ).number

    def save(self, attempt: int, first: int, last: int, num_ranks: int, *, commit: bool = True, **fields: object):
        refs = []
        for rank in range(num_ranks):
            rows = read_windows(list(range((first - 1) * BATCH + rank, last * BATCH, num_ranks)))
            if self._change and (attempt, rank, first) == (1, 0, 1):
                rows = self._change(rows)
            refs.append(self.lineage.records.put(attempt, rank, first, last, rows, None))
        if commit:
            self.commit(attempt, last, tuple(refs), **fields)
        return refs

    def commit(self, attempt: int, step: int, records: tuple[ObjectRef, ...], position: int | None = None) -> None:
        loader = LoaderState(step, step * BATCH if position is None else position)
        digests = (IDENTITY, digest_of({}), IDENTITY, journal_digest(()))
        self.lineage.commit(Manifest(attempt, step, 1, *digests, loader, {}, records, ()))

    def proof(self, tokens=TOKENS, batch: int | None = BATCH, segments_of=None, **progress_of: int) -> Proof:
        progress = {int(name.removeprefix("attempt_")): step for name, step in progress_of.items()}
        return prove(
            self.lineage,
            tokens,
            seq_len=SEQ_LEN,
            epoch_tokens=EPOCH_TOKENS,
            global_batch_size=batch,
            segments_of=segments_of,
            progress=progress,
        )


def two_epochs_with_incidents() -> Run:
    """8 steps are 384 tokens, over two epochs of 156; three attempts of 3, 2 and 1 ranks, a damaged checkpoint, a
    zombie.
    """
    run = Run()
    run.open()
    run.save(1, 1, 2, 3)
    run.save(1, 3, 4, 3)
    run.open(CheckpointRef(1, 4))
    run.save(2, 3, 5, 2)
    run.save(2, 6, 6, 2, commit=False)
    run.save(1, 5, 6, 3)
    run.open()
    run.save(3, 6, 8, 1)
    return run


@pytest.mark.parametrize("batch", [BATCH, None])
def test_proof_of_a_run_over_two_epochs_with_restarts_relayouts_and_a_zombie_holds(batch):
    proof = two_epochs_with_incidents().proof(batch=batch)
    assert proof.ok
    assert proof == Proof(
        steps=8,
        windows=48,
        samples_missing=0,
        samples_repeated=0,
        bytes_compared=48 * SEQ_LEN * 2,
        num_mismatches=0,
        mismatches=(),
        steps_redone=(6 - 2) + (6 - 5),
        epochs={"train": 48 * SEQ_LEN / EPOCH_TOKENS},
    )


def test_proof_counts_redone_steps_that_left_no_records_from_the_progress_seen():
    run = two_epochs_with_incidents()
    assert run.proof(attempt_1=5, attempt_2=7, attempt_3=9).steps_redone == (6 - 2) + (7 - 5)


def test_proof_counts_all_steps_of_an_attempt_that_left_no_checkpoint_as_redone():
    run = Run()
    run.open()
    run.save(1, 1, 2, 1)
    run.open()
    run.save(2, 3, 4, 1, commit=False)
    run.open()
    run.save(3, 3, 4, 1)
    assert run.proof().ok
    assert run.proof().steps_redone == 2


def test_proof_before_the_first_checkpoint_is_not_ok():
    run = Run()
    assert not run.proof().ok
    run.open()
    run.save(1, 1, 2, 1, commit=False)
    assert run.proof().steps == 0
    assert not run.proof().ok


def test_proof_of_a_rank_whose_records_are_not_named_counts_its_windows_as_missing():
    run = Run()
    run.open()
    refs = run.save(1, 1, 2, 3, commit=False)
    run.commit(1, 2, tuple(refs[:2]))
    proof = run.proof()
    assert (proof.samples_missing, proof.samples_repeated, proof.ok) == (4, 0, False)


def test_proof_of_records_named_twice_counts_their_windows_as_repeated():
    run = Run()
    run.open()
    refs = run.save(1, 1, 2, 3, commit=False)
    run.commit(1, 2, (*refs, refs[0]))
    proof = run.proof()
    assert (proof.samples_missing, proof.samples_repeated, proof.ok) == (0, 4, False)
    assert "are read twice" in proof.mismatches[0]


def changed(**columns: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(rows: WindowRows) -> WindowRows:
        copies = {name: getattr(rows, name).copy() for name in columns}
        return dataclasses.replace(rows, **{name: columns[name](copy) for name, copy in copies.items()})

    return change


def with_first(value: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda column: np.concatenate([np.array([value], column.dtype), column[1:]])


@pytest.mark.parametrize(
    ("change", "sentence", "missing", "repeated"),
    [
        (changed(xxh3=with_first(1)), "window 0: the model received other tokens than its segments hold", 0, 0),
        (changed(offset=with_first(1)), "window 0: the model received other tokens", 0, 0),
        (changed(offset=with_first(16)), "epoch 0: shard 0 member 0: tokens from 16 on are read twice", 0, 0),
        (changed(length=with_first(7)), "window 0 was read as 7 tokens, not 8", 0, 0),
        (changed(shard=with_first(9)), "window 0 was read from shard 9 member 0, which the data does not have", 0, 0),
        (changed(member=with_first(9)), "window 0 was read from shard 0 member 9, which the data does not have", 0, 0),
        (changed(offset=with_first(10**6)), "window 0: the model received other tokens", 0, 0),
        (changed(weight=with_first(0)), "window 0 has weight 0, but the model received tokens", 0, 0),
        (changed(position=with_first(999)), "window 999 lies beyond the 12 windows of the live chain", 1, 0),
        (changed(step=with_first(2)), "window 0 was read in step 2, but belongs to step 1", 0, 0),
    ],
)
def test_proof_of_a_run_with_one_lie_in_its_records_names_it(change, sentence, missing, repeated):
    run = Run(change)
    run.open()
    run.save(1, 1, 2, 3)
    proof = run.proof()
    assert not proof.ok
    assert any(sentence in mismatch for mismatch in proof.mismatches), proof.mismatches
    assert (proof.samples_missing, proof.samples_repeated) == (missing, repeated)


def columns_of(position: int) -> SegmentColumns:
    rows = read_windows([position])
    unused = np.zeros(len(rows.shard), np.int64)
    return SegmentColumns(
        rows.shard, rows.member, rows.offset, rows.length, unused, unused.astype(bool), unused.astype(bool)
    )


def test_proof_of_two_windows_under_each_others_position_fails_where_the_order_is_given():
    run = Run(changed(position=lambda column: np.concatenate([column[1::-1], column[2:]])))
    run.open()
    run.save(1, 1, 2, 3)
    assert run.proof().ok
    proof = run.proof(segments_of=columns_of)
    assert proof.mismatches == tuple(
        f"window {position}: its segments are not those that the order gives it" for position in (3, 0)
    )


def test_proof_of_an_honest_run_holds_where_the_order_is_given():
    assert two_epochs_with_incidents().proof(segments_of=columns_of).ok


def test_proof_of_a_window_under_another_position_counts_one_missing_and_one_repeated():
    run = Run(changed(position=with_first(3)))
    run.open()
    run.save(1, 1, 2, 3)
    proof = run.proof()
    assert (proof.samples_missing, proof.samples_repeated, proof.ok) == (1, 1, False)


def test_proof_of_a_segment_across_the_end_of_an_epoch_names_its_window():
    run = Run(changed(position=lambda column: np.where(column == 9, EPOCH_TOKENS // SEQ_LEN, column)))
    run.open()
    run.save(1, 1, 4, 3)
    assert any("window 19 has a segment across the end of an epoch" in m for m in run.proof().mismatches)


ZEROS = xxhash.xxh3_64_intdigest(np.zeros(SEQ_LEN, "<u4").tobytes())
LEFT_OUT = changed(weight=with_first(0), xxh3=with_first(ZEROS))


def run_with(change: Change, *entries: tuple[str, int, dict]) -> Run:
    """Two steps of three ranks, under a journal of these entries."""
    run = Run(change)
    run.open()
    for kind, position, payload in entries:
        run.lineage.append_journal(1, kind, position, payload)
    run.save(1, 1, 2, 3)
    return run


def damage_entry(*spans: tuple[int, int], shard: int = 1) -> tuple[str, int, dict]:
    return "damage", 0, {"number": shard, "action": "skip", "zero_weight": [list(span) for span in spans]}


@pytest.mark.parametrize("entry", [("skip", 0, {"num_windows": 1}), damage_entry((0, 1)), damage_entry((5, 9), (0, 2))])
def test_proof_of_a_window_of_weight_zero_holds_if_the_journal_says_so_and_the_model_received_zeros(entry):
    proof = run_with(LEFT_OUT, entry).proof()
    assert proof.ok and proof.bytes_compared == 11 * SEQ_LEN * 2
    assert (proof.windows_left_out, proof.windows_not_compared) == (1, 0)


@pytest.mark.parametrize("entries", [[], [damage_entry((1, 9))], [("mixture", 0, {"num_windows": 9, "weights": {}})]])
def test_proof_of_a_window_of_weight_zero_that_no_entry_takes_out_names_it(entries):
    proof = run_with(LEFT_OUT, *entries).proof()
    assert proof.mismatches == ("window 0 has weight 0, but no entry of the journal takes it out",)


def test_proof_of_a_window_that_only_a_dead_attempts_journal_takes_out_names_it():
    run = run_with(LEFT_OUT)
    run.open()
    run.lineage.append_journal(1, "skip", 0, {"num_windows": 1})
    assert run.proof().mismatches == ("window 0 has weight 0, but no entry of the journal takes it out",)


def test_proof_of_a_window_of_another_weight_names_it():
    proof = run_with(changed(weight=with_first(0.5)), damage_entry((0, 1))).proof()
    assert proof.mismatches == ("window 0 has weight 0.5, which is neither 0 nor 1",)


def without_first_segments(rows: WindowRows) -> WindowRows:
    kept = rows.segment_window != 0
    columns = {name: getattr(rows, name)[kept] for name in ("segment_window", "shard", "member", "offset", "length")}
    return dataclasses.replace(rows, **columns)


def test_proof_of_a_left_out_window_whose_segments_nobody_knows_holds():
    def segments_of(position):
        assert position != 0, "its index is lost: nobody may ask"
        return columns_of(position)

    run = run_with(lambda rows: without_first_segments(LEFT_OUT(rows)), damage_entry((0, 1)))
    assert run.proof(segments_of=segments_of).ok


def test_proof_of_a_window_with_weight_but_without_segments_names_it():
    proof = run_with(without_first_segments, damage_entry((0, 1))).proof()
    assert "window 0 was read as 0 tokens, not 8" in proof.mismatches


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_proof_of_windows_read_before_their_shard_was_damaged_counts_them_apart(how):
    run = run_with(lambda rows: rows, damage_entry((50, 60), shard=1))
    lost = {p: t for p, t in TOKENS.items() if p != (1, 0)} | ({} if how == "gone" else {(1, 0): TOKENS[1, 0] + 1})
    proof = run.proof(lost)
    reading = {p for p in range(12) if any(s[0] == 1 for s in segments_between(p * SEQ_LEN, (p + 1) * SEQ_LEN))}
    assert proof.ok and proof.windows_not_compared == len(reading) > 0
    assert proof.bytes_compared == (12 - len(reading)) * SEQ_LEN * 2


def test_proof_of_a_damaged_shard_does_not_cover_up_for_another():
    run = run_with(lambda rows: rows, damage_entry((50, 60), shard=2))
    proof = run.proof({p: t for p, t in TOKENS.items() if p != (1, 0)})
    assert not proof.ok and all("shard 1 member 0, which the data does not have" in m for m in proof.mismatches)


def test_proof_of_windows_whose_order_nobody_can_tell_counts_them_apart():
    run = run_with(lambda rows: rows, damage_entry((50, 60)))
    proof = run.proof(segments_of=lambda position: None if position in (3, 4) else columns_of(position))
    assert proof.ok and proof.windows_not_compared == 2


def test_proof_against_data_with_one_token_changed_names_the_window_that_read_it():
    run = two_epochs_with_incidents()
    other = TOKENS | {(1, 0): TOKENS[1, 0] ^ np.array([0, 0, 0, 1, 0, 0, 0], np.uint16)}
    proof = run.proof(other)
    places = [sum(len(TOKENS[p]) for p in sorted(TOKENS) if p < (1, 0)) + 3]
    places.append(EPOCH_TOKENS + sum(len(TOKENS[p]) for p in TOKENS if p > (1, 0)) + 3)
    assert sorted(proof.mismatches) == sorted(
        f"window {place // SEQ_LEN}: the model received other tokens than its segments hold" for place in places
    )


def test_proof_of_a_loader_that_stands_elsewhere_than_its_steps_names_the_checkpoint():
    run = Run()
    run.open()
    run.save(1, 1, 2, 1, position=11)
    proof = run.proof()
    assert proof.mismatches == ("checkpoint attempt 1 step 2 stands at position 11, but its steps have 12 windows",)


def test_proof_with_many_mismatches_counts_all_and_names_the_first_few():
    run = Run(changed(xxh3=lambda column: column + np.uint64(1)))
    run.open()
    run.save(1, 1, 6, 1)
    proof = run.proof()
    assert (proof.num_mismatches, len(proof.mismatches)) == (36, MAX_NAMED)


def test_shard_cache_reads_each_shard_once_while_it_is_kept_and_never_keeps_more():
    reads: list[int] = []

    def read_shard(shard: int):
        reads.append(shard)
        return ((member, TOKENS[shard, member]) for member in range(len(SHARD_MEMBERS[shard])))

    run = two_epochs_with_incidents()
    assert run.proof(ShardCache(read_shard, num_shards=3)).ok
    assert sorted(reads) == [0, 1, 2]
    cache = ShardCache(read_shard, num_shards=1)
    assert cache[0, 1] is TOKENS[0, 1]
    assert cache[1, 0] is TOKENS[1, 0]
    assert cache[0, 0] is TOKENS[0, 0]
    assert reads[3:] == [0, 1, 0]
    with pytest.raises(KeyError):
        cache[0, 2]


MEMBERS = st.sampled_from([(0, 0, 0), (0, 1, 0), (1, 0, 0)])
SPAN = st.tuples(MEMBERS, st.integers(0, 12), st.integers(1, 8)).map(
    lambda span: (*span[0], span[1], span[1] + span[2])
)


@settings(deadline=None)
@given(st.lists(st.lists(SPAN, max_size=6), max_size=6))
@example([[(0, 0, 0, 0, 8), (0, 0, 0, 1, 2), (0, 0, 0, 4, 6)]])
def test_spans_agree_with_a_set_of_single_tokens(batches):
    spans, seen = Spans(), set()
    for batch in batches:
        tokens = [(*span[:3], token) for span in batch for token in range(span[3], span[4])]
        repeats = len(tokens) > len(set(tokens)) or bool(seen & set(tokens))
        twice = spans.add(np.array(batch, np.int64).reshape(-1, 5))
        assert bool(len(twice)) == repeats
        seen |= set(tokens)
        assert seen == {(*row[:3], token) for row in spans.rows.tolist() for token in range(row[3], row[4])}
    runs = [token for token in seen if (*token[:3], token[3] - 1) not in seen]
    assert len(spans.rows) == len(runs)
