"""What every reader gives: rows of token ids in the order of their source, many of them flat in one array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from phalanx.data.importing.errors import BadTokens

BLOCK_TOKENS = 1 << 22  # what a reader holds at a time, unless one row is longer


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that follow each other in the file `path`: tokens [sum of lengths] of an integer type, lengths int64 [rows].

    The first is row `first_row` of its file (counted from 0), from its token `offset` on; ids: where rows have their
    own. num_bytes: of the input, as it lies there.
    """

    path: str
    first_row: int
    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    num_bytes: int
    offset: int = 0
    ids: tuple[str, ...] | None = None

    def starts(self) -> NDArray[np.int64]:
        """First token of each row, and the number of tokens at the end, int64 [rows + 1]."""
        starts = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=starts[1:])
        return starts

    def name(self, row: int, offset: int) -> str:
        """The id of what begins at token `offset` of row `row` (counted from the first here)."""
        within = offset + (self.offset if row == 0 else 0)
        name = self.ids[row] if self.ids is not None else f"{self.path}#{self.first_row + row}"
        return f"{name}@{within}" if within else name


def checked(rows: Rows, vocab_size: int, where: str) -> Rows:
    """The same rows in the type that a dataset of this vocabulary stores; no id changes.

    where: the file, for errors. Raises BadTokens, naming file, row and value, for an id that the vocabulary lacks.
    """
    tokens = rows.tokens
    if tokens.dtype.kind not in "iu":
        raise BadTokens(
            where, expected="token ids of an integer type", value=tokens.dtype.name, remedy="import ids, not numbers"
        )
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        first = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
        row = int(np.searchsorted(rows.starts(), first, side="right")) - 1
        within = first - int(rows.starts()[row]) + (rows.offset if row == 0 else 0)
        raise BadTokens(
            f"{where}, row {rows.first_row + row}, token {within}",
            value=int(tokens[first]),
            expected=f"a token id from 0 to {vocab_size - 1}",
            remedy="check that the file holds what you say it does (--dtype, --column), or name the vocabulary it was "
            "made with (--vocab-size, --tokenizer)",
        )
    return replace(rows, tokens=tokens.astype("<u2" if vocab_size <= 1 << 16 else "<u4", copy=False))


def gathered(
    path: str, found: Iterable[tuple[NDArray[np.integer], str | None, int]], first_row: int = 0
) -> Iterator[Rows]:
    """Single rows (tokens, id or None, bytes of the input), put together into blocks; a block has one type."""
    tokens: list[NDArray[np.integer]] = []
    ids: list[str] = []
    num_tokens = num_bytes = 0
    for row, row_id, row_bytes in found:
        if tokens and (num_tokens >= BLOCK_TOKENS or row.dtype != tokens[0].dtype):
            yield _block(path, first_row, tokens, ids, num_bytes)
            first_row += len(tokens)
            tokens, ids, num_tokens, num_bytes = [], [], 0, 0
        tokens.append(row)
        ids += [] if row_id is None else [row_id]
        num_tokens += len(row)
        num_bytes += row_bytes
    if tokens:
        yield _block(path, first_row, tokens, ids, num_bytes)


def _block(path: str, first_row: int, tokens: list[NDArray[np.integer]], ids: list[str], num_bytes: int) -> Rows:
    lengths = np.array([len(row) for row in tokens], dtype=np.int64)
    return Rows(path, first_row, np.concatenate(tokens), lengths, num_bytes, ids=tuple(ids) if ids else None)


def groups_of(lengths: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbours whose lengths sum to about `limit`, at least one in each."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(limit, total, limit), side="left") + 1
    yield from pairwise(np.unique(np.concatenate([[0], cuts, [len(lengths)]])).tolist())
