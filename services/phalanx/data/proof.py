"""The proof that a run lost nothing: its step records along the live chain, against a second reading of the very same
segments.

On the live chain every window position 0 .. windows - 1 must occur once, no token of an epoch may be read twice, and
what the model received (its digest in the records) must be what a plain reader finds there. A window without weight is
accounted for by the journal, which must take it out; of a shard that the journal calls damaged, what was read before
may be gone by now, and is counted apart. What attempts did beyond
the live chain was redone, and is counted apart. Records are streamed one object at a time: memory is two bytes a
window, and 40 bytes a member once it is read whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from phalanx.data.left_out import LeftOut, left_out_by
from phalanx.lineage import Lineage, LoaderState, WindowRows
from phalanx.stream.order import SegmentColumns
from phalanx.stream.view import View

Int64: TypeAlias = npt.NDArray[np.int64]
TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]
MAX_NAMED: Final = 10


class TokenSource(Protocol):
    """The second reading: tokens of (shard, member), read without Phalanx's own reader; KeyError for a member that is
    not there.
    """

    def __getitem__(self, place: tuple[int, int], /) -> TokenArray: ...


class ShardCache:
    """A TokenSource that reads a shard when one of its members is asked for, and keeps the last `num_shards` of them.

    read_shard: gives (member, tokens) for each member of the shard of that number. Windows of one step touch the shards
    of one block or two, so twice a block's shards is enough to read each shard about once.
    """

    def __init__(self, read_shard: Callable[[int], Iterable[tuple[int, TokenArray]]], num_shards: int = 8) -> None:
        self._read_shard, self._num_shards = read_shard, num_shards
        self._shards: OrderedDict[int, dict[int, TokenArray]] = OrderedDict()

    def __getitem__(self, place: tuple[int, int], /) -> TokenArray:
        shard, member = place
        if shard not in self._shards:
            self._shards[shard] = dict(self._read_shard(shard))
        self._shards.move_to_end(shard)
        while len(self._shards) > self._num_shards:
            self._shards.popitem(last=False)
        return self._shards[shard][member]


@dataclass(frozen=True, slots=True)
class Proof:
    """What the check found on the live chain up to its newest checkpoint.

    steps: that checkpoint's; the first `origin_steps` of them are those of the job that this one was forked from, and
    are proven there. windows: positions that must occur. samples_missing, samples_repeated: windows that do not
    occur, and occurrences beyond the first. bytes_compared: of tokens, as the second reading has them. num_mismatches:
    everything else that is wrong, the first MAX_NAMED of it in `mismatches`, a sentence each. steps_redone: steps that
    attempts did beyond the live chain. windows_left_out: those that the journal takes out. windows_not_compared: read
    with weight from a shard that the journal calls damaged, so that the second reading, or their order, is gone.
    epochs: passes over each source up to the newest checkpoint, by name.
    """

    steps: int
    windows: int
    samples_missing: int
    samples_repeated: int
    bytes_compared: int
    num_mismatches: int
    mismatches: tuple[str, ...]
    steps_redone: int
    windows_left_out: int = 0
    windows_not_compared: int = 0
    origin_steps: int = 0
    epochs: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is something to prove, and it holds."""
        return self.steps > self.origin_steps and not (
            self.samples_missing or self.samples_repeated or self.num_mismatches
        )


def prove(
    lineage: Lineage,
    tokens: TokenSource,
    *,
    seq_len: int,
    epoch_tokens: int | Sequence[int],
    view: View | None = None,
    global_batch_size: int | None = None,
    segments_of: Callable[[int], SegmentColumns | None] | None = None,
    progress: Mapping[int, int] | None = None,
    names: Sequence[str] = ("train",),
) -> Proof:
    """Checks the records of the live chain.

    seq_len: tokens a window. epoch_tokens: tokens of each source, called `names`. view: which window of which source
    lies where, and which are taken out; without it there is one source, and the journal's positions.
    global_batch_size: windows a step, if it never changed; without it the number of windows is what the newest
    checkpoint's loader state says. segments_of: the order, which gives the segments that a position must have
    (`Order.window`), or None where nobody can tell them any more; without it any disjoint segments will do.
    progress: for each attempt the last step it was seen to finish, as it may have died before it stored records of it.
    Raises DamagedObject for records that cannot be read.
    """
    found = _Mismatches()
    start = _start(lineage)
    steps, windows = _extent(lineage, start, global_batch_size, found)
    seen = np.zeros(windows, np.uint16)
    spans, left_out = Spans(), left_out_by(lineage)
    view = view or View(zero_weight=left_out.plan.zero_weight)
    grid = _Grid(view, seq_len, np.array(epoch_tokens, np.int64).reshape(-1))
    bytes_compared, num_left_out, not_compared = 0, 0, set[int]()
    for rows, _ in lineage.records.live():
        _check_positions(rows, start, seen, global_batch_size, found)
        num_left_out += _check_weights(rows, grid, found)
        complete = _check_segments(rows, spans, grid, found)
        if segments_of is not None:
            not_compared |= _check_order(rows, segments_of, found)
        num_bytes, unknown = _check_tokens(rows, complete, tokens, seq_len, left_out, found)
        bytes_compared, not_compared = bytes_compared + num_bytes, not_compared | unknown
    return Proof(
        steps=steps,
        windows=windows,
        samples_missing=int((seen == 0).sum()),
        samples_repeated=int(seen.sum(dtype=np.int64) - (seen > 0).sum()),
        bytes_compared=bytes_compared,
        num_mismatches=found.count,
        mismatches=tuple(found.named),
        steps_redone=count_redone_steps(lineage, progress or {}),
        origin_steps=start.step,
        windows_left_out=num_left_out,
        windows_not_compared=len(not_compared),
        epochs=dict(zip(names, grid.epochs(start.position + windows), strict=True)),
    )


def count_redone_steps(lineage: Lineage, progress: Mapping[int, int]) -> int:
    """Steps that attempts did after the checkpoint from which the live chain goes on; the newest attempt redid none
    yet.

    progress: see `prove`; the records that an attempt stored count too.
    """
    live_ends = {link.attempt.number: link.last_step for link in lineage.chain()}
    recorded = lineage.records.last_steps()
    redone = 0
    for attempt in lineage.attempts()[:-1]:
        live_end = live_ends.get(attempt.number, attempt.start_step)
        assert live_end is not None, "only the newest attempt has no child"
        last = max(recorded[attempt.number], progress.get(attempt.number, 0))
        redone += max(0, last - live_end)
    return redone


class _Mismatches:
    """Counts what is wrong and keeps the first few in words."""

    def __init__(self) -> None:
        self.count, self.named = 0, list[str]()

    def add(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            self.count += 1
            if len(self.named) < MAX_NAMED:
                self.named.append(sentence)


def _start(lineage: Lineage) -> LoaderState:
    """Where the job's own reading begins: a fork's where its origin stood."""
    job = lineage.read_job()
    origin = job.origin if job is not None else None
    return LoaderState(0, 0) if origin is None else LoaderState(origin.step, origin.position)


def _extent(lineage: Lineage, start: LoaderState, global_batch_size: int | None, found: _Mismatches) -> tuple[int, int]:
    """The step of the newest live checkpoint, and the windows from `start` up to it."""
    live = lineage.checkpoints()
    if not live:
        return start.step, 0
    loader = lineage.manifest(live[-1]).loader
    if global_batch_size is None:
        return loader.step, loader.position - start.position
    windows = (loader.step - start.step) * global_batch_size
    if loader.position != start.position + windows:
        found.add([f"checkpoint {live[-1]} stands at position {loader.position}, but its steps have {windows} windows"])
    return loader.step, windows


def _check_positions(
    rows: WindowRows, start: LoaderState, seen: npt.NDArray[np.uint16], batch: int | None, found: _Mismatches
) -> None:
    """Counts each window in `seen`, whose first is the one at `start`."""
    place = rows.position - start.position
    outside = (place < 0) | (place >= len(seen))
    found.add(f"window {p} lies beyond the {len(seen)} windows of the live chain" for p in rows.position[outside])
    np.add.at(seen, place[~outside], 1)
    if batch is not None:
        right = place // batch + 1 + start.step
        wrong = right != rows.step
        triples = zip(rows.position[wrong], rows.step[wrong], right[wrong], strict=True)
        found.add(f"window {p} was read in step {s}, but belongs to step {r}" for p, s, r in triples)


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Where windows lie on the streams of their sources. epoch_tokens: int64 [sources]."""

    view: View
    seq_len: int
    epoch_tokens: Int64

    def place(self, positions: Int64) -> tuple[Int64, Int64]:
        """Source and window of each position; those that the view does not have are windows of the first source."""
        sources, windows = np.zeros_like(positions), positions.copy()
        known = self.is_known(positions)
        sources[known], windows[known] = self.view.place(positions[known])
        return sources, windows

    def is_known(self, positions: Int64) -> npt.NDArray[np.bool_]:
        """Whether the view has a window for each position."""
        known: npt.NDArray[np.bool_] = positions >= self.view.mixture.start
        return known if self.view.end is None else known & (positions < self.view.end)

    def left_out(self, positions: Int64) -> npt.NDArray[np.bool_]:
        """Whether the journal takes out each window."""
        found = np.zeros(len(positions), bool)
        known = self.is_known(positions)
        found[known] = self.view.left_out(positions[known])
        return found

    def epochs(self, position: int) -> list[float]:
        """Passes over each source before a position."""
        return [
            count * self.seq_len / int(tokens)
            for count, tokens in zip(self.view.mixture.counts(position), self.epoch_tokens, strict=True)
        ]


def _check_weights(rows: WindowRows, grid: _Grid, found: _Mismatches) -> int:
    """Every weight is 1, or 0 where the journal says so; returns how many windows have weight 0."""
    without = rows.weight == 0
    odd = ~without & (rows.weight != 1)
    pairs = zip(rows.position[odd], rows.weight[odd], strict=True)
    found.add(f"window {p} has weight {w}, which is neither 0 nor 1" for p, w in pairs)
    unexplained = without & ~grid.left_out(rows.position)
    found.add(f"window {p} has weight 0, but no entry of the journal takes it out" for p in rows.position[unexplained])
    return int(without.sum())


def _check_segments(rows: WindowRows, spans: Spans, grid: _Grid, found: _Mismatches) -> npt.NDArray[np.bool_]:
    """Enters the segments into `spans`; returns bool [n], which windows have seq_len tokens. A window without weight
    may have no segments: the index that would tell them was lost.
    """
    seq_len = grid.seq_len
    window_tokens = np.zeros(len(rows), np.int64)
    np.add.at(window_tokens, rows.segment_window, rows.length)
    complete: npt.NDArray[np.bool_] = window_tokens == seq_len
    wrong = ~complete & ~((rows.weight == 0) & (window_tokens == 0))
    pairs = zip(rows.position[wrong], window_tokens[wrong], strict=True)
    found.add(f"window {p} was read as {n} tokens, not {seq_len}" for p, n in pairs)
    before = np.cumsum(rows.length) - rows.length
    window_starts = before[np.searchsorted(rows.segment_window, rows.segment_window)]
    sources, windows = grid.place(rows.position)
    token = windows[rows.segment_window] * seq_len + before - window_starts
    epoch_tokens = grid.epoch_tokens[sources[rows.segment_window]]
    epoch = token // epoch_tokens
    crossing = (token + rows.length - 1) // epoch_tokens != epoch
    found.add(
        f"window {p} has a segment across the end of an epoch" for p in rows.position[rows.segment_window[crossing]]
    )
    twice = spans.add(np.stack([epoch, rows.shard, rows.member, rows.offset, rows.offset + rows.length], axis=1))
    found.add(f"epoch {e}: shard {s} member {m}: tokens from {start} on are read twice" for e, s, m, start, _ in twice)
    return complete


def _check_order(rows: WindowRows, segments_of: Callable[[int], SegmentColumns | None], found: _Mismatches) -> set[int]:
    """Returns the windows whose order nobody can tell any more."""
    bounds, unknown = np.searchsorted(rows.segment_window, np.arange(len(rows) + 1)), set[int]()
    for row, position in enumerate(rows.position.tolist()):
        first, end = bounds[row : row + 2]
        if first == end and rows.weight[row] == 0:
            continue
        expected = segments_of(position)
        if expected is None:
            if rows.weight[row] != 0:
                unknown.add(position)
            continue
        columns = ("shard", "member", "offset", "length")
        if not all(np.array_equal(getattr(expected, name), getattr(rows, name)[first:end]) for name in columns):
            found.add([f"window {position}: its segments are not those that the order gives it"])
    return unknown


def _check_tokens(
    rows: WindowRows,
    complete: npt.NDArray[np.bool_],
    tokens: TokenSource,
    seq_len: int,
    left_out: LeftOut,
    found: _Mismatches,
) -> tuple[int, set[int]]:
    """Compares the digests of the complete windows with the second reading; returns the bytes of tokens compared, and
    the windows that were read from damaged shards and are no longer there.

    A window of weight 0 was not read: the model received token 0 in all its places.
    """
    zeros = _digest(np.zeros(seq_len, np.uint32))
    bounds = np.searchsorted(rows.segment_window, np.arange(len(rows) + 1))
    without = rows.weight == 0
    lies = without & (rows.xxh3 != np.uint64(zeros))
    found.add(f"window {p} has weight 0, but the model received tokens" for p in rows.position[lies])
    bytes_compared, unknown = 0, set[int]()
    compared = complete & ~without
    for row in np.flatnonzero(compared)[np.argsort(rows.position[compared], kind="stable")]:
        segments = range(bounds[row], bounds[row + 1])
        num_bytes, problem = _compare(rows, int(row), segments, tokens)
        if problem and not left_out.shards.isdisjoint(rows.shard[segments.start : segments.stop].tolist()):
            unknown.add(int(rows.position[row]))
            continue
        bytes_compared += num_bytes
        found.add([problem] if problem else [])
    return bytes_compared, unknown


def _compare(rows: WindowRows, row: int, segments: range, tokens: TokenSource) -> tuple[int, str]:
    """Bytes that the second reading has of one window, and what is wrong with them, "" for nothing."""
    position = int(rows.position[row])
    try:
        parts = list(_read(rows, segments, tokens))
    except KeyError as error:
        return 0, f"window {position} was read from {error.args[0]}, which the data does not have"
    is_same = _digest(np.concatenate(parts)) == int(rows.xxh3[row])
    problem = "" if is_same else f"window {position}: the model received other tokens than its segments hold"
    return sum(part.nbytes for part in parts), problem


def _read(rows: WindowRows, segments: Iterable[int], tokens: TokenSource) -> Iterator[TokenArray]:
    for segment in segments:
        shard, member, offset = int(rows.shard[segment]), int(rows.member[segment]), int(rows.offset[segment])
        try:
            held = tokens[shard, member]
        except KeyError as error:
            raise KeyError(f"shard {shard} member {member}") from error
        yield held[offset : offset + int(rows.length[segment])]


def _digest(window: TokenArray) -> int:
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(window, dtype="<u4").tobytes()))


class Spans:
    """The tokens read so far, as disjoint spans; spans that touch become one, so a member that is read whole takes one
    row.

    Rows are int64 [k, 5]: epoch, shard, member, first token, token after the last.
    """

    def __init__(self) -> None:
        self.rows: Int64 = np.zeros((0, 5), np.int64)

    def add(self, rows: Int64) -> Int64:
        """Enters `rows` [k, 5]; returns those spans, old or new, that begin inside another one: tokens that are read
        twice.
        """
        rows = np.concatenate([self.rows, rows])
        if not len(rows):
            return rows
        rows = rows[np.lexsort(rows.T[::-1])]
        start, stop = rows[:, 3], rows[:, 4]
        other_member = np.ones(len(rows), bool)
        other_member[1:] = (rows[1:, :3] != rows[:-1, :3]).any(axis=1)
        # Raised by a step a member, the running maximum of `stop` starts anew at each member.
        raised = np.cumsum(other_member) * (int(stop.max()) + 1)
        reached = np.maximum.accumulate(stop + raised) - raised
        reached_before = np.where(other_member, -1, np.roll(reached, 1))
        begins = start > reached_before
        ends = np.roll(begins, -1)
        merged = rows[begins]
        merged[:, 4] = reached[ends]
        self.rows = merged
        return rows[start < reached_before]
