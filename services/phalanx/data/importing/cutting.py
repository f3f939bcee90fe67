"""Rows -> documents, by rows or by an EOS id. Pure: rows come as iterators.

By EOS, the pieces of a stream are cut alone: a piece owns the documents that begin right behind an EOS inside it, and
the stream's first piece also what begins the stream. So a piece reads on into the next ones up to the first EOS there,
and what lies before its own first EOS belongs to an earlier piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.importing.errors import BadTokens
from phalanx.data.importing.rows import Rows
from phalanx.stream.shards import MAX_DOCUMENT_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents in order: tokens [sum of lengths], lengths int64 (none is 0), ids. is_open bool [documents]: those that
    don't end with the EOS id. num_empty: rows without a token, which are left out.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    ids: Sequence[str]
    num_bytes: int
    is_open: NDArray[np.bool_]
    num_empty: int = 0


def by_rows(all_rows: Iterable[Rows], eos_id: int) -> Iterator[Documents]:
    """Each row is a document."""
    for rows in all_rows:
        kept = np.flatnonzero(rows.lengths)
        lengths, last = rows.lengths[kept], rows.starts()[1:][kept] - 1
        yield Documents(
            tokens=rows.tokens,
            lengths=lengths,
            ids=[rows.name(row, 0) for row in kept.tolist()],
            num_bytes=rows.num_bytes,
            is_open=rows.tokens[last] != eos_id,
            num_empty=len(rows.lengths) - len(kept),
        )


def by_eos(own: Iterable[Rows], following: Iterable[Rows], eos_id: int, *, is_first: bool) -> Iterator[Documents]:
    """The documents that a piece owns. own: its rows; following: the stream's rows behind them, read as far as needed;
    is_first: the piece begins the stream.

    Raises BadTokens for a document longer than a shard can hold.
    """
    tail = _Tail() if is_first else None  # None: no document of ours has begun
    for rows in own:
        documents, tail = _cut(rows, tail, eos_id)
        yield documents
    if tail is not None:
        yield from _finish(tail, following, eos_id)


class _Tail:
    """A document that goes on: its tokens so far, in blocks. It has no id before its first token."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.blocks: list[NDArray[np.integer]] = []
        self.num_tokens = 0

    def add(self, rows: Rows, start: int, stop: int) -> None:
        """Appends the tokens [start, stop) of `rows`."""
        if start == stop:
            return
        if self.id is None:
            self.id = _name(rows, start)
        self.blocks.append(rows.tokens[start:stop])
        self.num_tokens += stop - start
        if self.num_tokens > MAX_DOCUMENT_TOKENS:
            raise BadTokens(
                f"document {self.id!r}",
                expected=f"an EOS id within {MAX_DOCUMENT_TOKENS} tokens",
                remedy="check --eos-id",
            )


def _cut(rows: Rows, tail: _Tail | None, eos_id: int) -> tuple[Documents, _Tail | None]:
    """What ends in `rows`, and what goes on behind them."""
    ends = np.flatnonzero(rows.tokens == eos_id) + 1
    if not len(ends):
        if tail is not None:
            tail.add(rows, 0, len(rows.tokens))
        return Documents(rows.tokens[:0], ends, (), rows.num_bytes, np.zeros(0, np.bool_)), tail
    if tail is None:
        first, ends = int(ends[0]), ends[1:]
        before: list[NDArray[np.integer]] = []
        lengths, ids = np.diff(ends, prepend=first), _names(rows, first, ends)
    else:
        first, stop = 0, int(ends[0])
        tail.add(rows, 0, stop)
        before, first, ends = tail.blocks, stop, ends[1:]
        lengths = np.concatenate([[tail.num_tokens], np.diff(ends, prepend=first)])
        ids = [tail.id or "", *_names(rows, first, ends)]
    stop = int(ends[-1]) if len(ends) else first
    following = _Tail()
    following.add(rows, stop, len(rows.tokens))
    tokens = np.concatenate([*before, rows.tokens[first:stop]])
    return Documents(tokens, lengths, ids, rows.num_bytes, np.zeros(len(ids), np.bool_)), following


def _finish(tail: _Tail, following: Iterable[Rows], eos_id: int) -> Iterator[Documents]:
    """The piece's last document, up to the first EOS behind the piece or to the stream's end."""
    is_open = True
    for rows in following:
        ends = np.flatnonzero(rows.tokens == eos_id)
        if len(ends):
            tail.add(rows, 0, int(ends[0]) + 1)
            is_open = False
            break
        tail.add(rows, 0, len(rows.tokens))
    if tail.id is not None:
        tokens = np.concatenate(tail.blocks)
        yield Documents(tokens, np.array([len(tokens)]), (tail.id,), 0, np.array([is_open]))


def _names(rows: Rows, first: int, ends: NDArray[np.int64]) -> list[str]:
    """Ids of the documents that begin at `first` and behind each end but the last."""
    begins = np.concatenate([[first], ends[:-1]])[: len(ends)]
    starts = rows.starts()
    numbers = np.searchsorted(starts, begins, side="right") - 1
    offsets = begins - starts[numbers]
    return [rows.name(row, offset) for row, offset in zip(numbers.tolist(), offsets.tolist(), strict=True)]


def _name(rows: Rows, token: int) -> str:
    starts = rows.starts()
    row = int(np.searchsorted(starts, token, side="right")) - 1
    return rows.name(row, token - int(starts[row]))
