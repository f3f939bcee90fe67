"""Which documents of a split say a text: an exact search through all its tokens, piece by piece, several at a time.

What is searched is what the tokens say (`TokenText`): the text as it was prepared, after the rules for odd text. Upper
and lower case count, a text never goes across a special token, and nothing is found that is not there. A damaged member
ends the search with an error: without it nobody can say where the text is not. There is no index: a search costs one
reading of the shards, until enough documents are found.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PhalanxError
from phalanx.data.spelling import Finder, Vocabulary
from phalanx.objects import ObjectStore
from phalanx.stream.manifest import Split
from phalanx.stream.members import ShardIndices
from phalanx.stream.pieces import SplitPieces
from phalanx.stream.token_text import TokenText

MAX_TEXT_BYTES: Final = 16 << 10
THREADS: Final = min(8, 2 * (os.cpu_count() or 1))
Tokens: TypeAlias = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A document that says the text. document: its number in the shard; token: in it, where the first occurrence
    begins (None where the tokenizer can't tell); count: occurrences.
    """

    shard: int
    document: int
    token: int | None
    count: int


Search: TypeAlias = Callable[[list[Tokens], NDArray[np.int64]], Iterator[tuple[int, int | None, int]]]


def find_text(
    store: ObjectStore, split: Split, tokenizer: TokenText, text: str, told: Callable[[int], None] = lambda shards: None
) -> Iterator[TextMatch]:
    """Every document that says `text`, in the order of the shards; whoever has enough stops asking. told: hears how
    many shards are searched.

    Raises PhalanxError for a text that nothing can say, OutsideError (DamagedShard) where tokens can't be read.
    """
    needle = _checked(text)
    indices = ShardIndices(store, split, capacity=2 * THREADS)
    pieces = SplitPieces(store, split, indices)
    search = _spelt(split, tokenizer, needle, pieces) if tokenizer.has_fixed_bytes else _decoded(tokenizer, text)

    def look(shard: int, piece: int) -> list[TextMatch]:
        members = pieces.cut(shard).members(piece)
        firsts = indices(shard).member_first_documents()
        lengths = indices(shard).lengths[firsts[members.start] : firsts[members.stop]].astype(np.int64)
        ends = np.cumsum(lengths)
        found = search(pieces.tokens(shard, piece), ends)
        return [TextMatch(shard, int(firsts[members.start]) + d, token, count) for d, token, count in found]

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="find-text")
    try:
        yield from _in_order(pool, look, _places(split, pieces), told)
        told(split.num_shards)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _checked(text: str) -> bytes:
    try:
        needle = text.encode()
    except UnicodeEncodeError:
        needle = b""
    if not 0 < len(needle) <= MAX_TEXT_BYTES:
        raise PhalanxError(
            "--text",
            value=text[:80].encode(errors="replace").decode(),
            expected=f"text in UTF-8 of 1 to {MAX_TEXT_BYTES:,} bytes",
            remedy="give a sentence of the document",
        )
    return needle


def _places(split: Split, pieces: SplitPieces) -> Iterator[tuple[int, int]]:
    for shard in range(split.num_shards):
        for piece in range(len(pieces.cut(shard).first_members) - 1):
            yield shard, piece


def _in_order(
    pool: ThreadPoolExecutor,
    look: Callable[[int, int], list[TextMatch]],
    places: Iterator[tuple[int, int]],
    told: Callable[[int], None],
) -> Iterator[TextMatch]:
    """The matches of each place in order, a few places ahead of who asks."""
    started = deque[tuple[int, Future[list[TextMatch]]]]()

    def first() -> list[TextMatch]:
        shard, future = started.popleft()
        found = future.result()
        told(shard)
        return found

    for place in places:
        started.append((place[0], pool.submit(look, *place)))
        if len(started) > 2 * THREADS:
            yield from first()
    while started:
        yield from first()


def _spelt(split: Split, tokenizer: TokenText, needle: bytes, pieces: SplitPieces) -> Search:
    """The search for a tokenizer whose tokens are fixed strings of bytes."""
    table = tokenizer.token_bytes
    # Ids that the tokenizer lacks say nothing: the last of the table stands for all of them.
    table = table + [b""] * max(1, split.vocab_size - len(table), (1 << 16) - len(table))
    finder = Finder(Vocabulary(table).spelling(needle), _known(pieces.tokens(0, 0)[0], len(table)))

    def search(members: list[Tokens], ends: NDArray[np.int64]) -> Iterator[tuple[int, int | None, int]]:
        before = 0
        for tokens in members:
            found = finder.find(_known(tokens, len(table))) + before
            before += len(tokens)
            documents = np.searchsorted(ends, found[:, 0], side="right")
            whole = documents == np.searchsorted(ends, found[:, 1], side="right")
            numbers, firsts, counts = np.unique(documents[whole], return_index=True, return_counts=True)
            starts = np.concatenate([[0], ends])[numbers]
            tokens_in = found[whole][firsts, 0] - starts
            yield from zip(numbers.tolist(), tokens_in.tolist(), counts.tolist(), strict=True)

    # A text that begins with a space may lie over the one that is not part of the document: only decoding tells.
    return _confirmed(search, tokenizer, needle) if tokenizer.strips_first_space and needle[:1] == b" " else search


def _confirmed(search: Search, tokenizer: TokenText, needle: bytes) -> Search:
    """The same search without what begins in the space that a document loses at its beginning."""
    text = needle.decode()

    def confirmed(members: list[Tokens], ends: NDArray[np.int64]) -> Iterator[tuple[int, int | None, int]]:
        tokens, starts = np.concatenate(members), np.concatenate([[0], ends])
        for number, token, count in search(members, ends):
            if token == 0:
                said = tokenizer.decode(tokens[starts[number] : ends[number]])
                count = said.count(text)
            if count:
                yield number, token, count

    return confirmed


def _known(tokens: Tokens, size: int) -> Tokens:
    """Tokens with the last of a table of `size` for those that it lacks."""
    return tokens if size > np.iinfo(tokens.dtype).max else np.minimum(tokens, tokens.dtype.type(size - 1))


def _decoded(tokenizer: TokenText, text: str) -> Search:
    """The search for any other tokenizer: each document is decoded."""

    def search(members: list[Tokens], ends: NDArray[np.int64]) -> Iterator[tuple[int, int | None, int]]:
        documents = np.split(np.concatenate(members), ends[:-1])
        for number, said in enumerate(tokenizer.decode_many(documents)):
            if text in said:
                yield number, None, said.count(text)

    return search
