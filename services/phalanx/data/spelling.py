"""Where a text lies in tokens, whatever it was cut into; pure. For tokenizers whose tokens are fixed strings of bytes.

A tokenizer cuts the same words differently after other words, so the tokens of a text are not found by encoding it.
Instead every way in which one token can lie over the text is listed once: inside it, over its beginning, over its end,
or around it. An occurrence is a run of tokens that lie end to end over the whole text. The search begins at the byte of
the text that the fewest tokens of a sample could cover, by one look-up a token of the data, and goes on from there to
both sides. What it finds is exact: every occurrence in the bytes of a run of tokens, and nothing else. A special token
has no bytes and ends a run: no text goes across it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PIVOTS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Spelling:
    """How tokens lie over a text of `size` bytes. over: (token, byte of the text at which it begins), sorted, int64
    [k, 2]; the byte may lie before the text. token_sizes: bytes of each token, int64 [vocabulary].
    """

    size: int
    over: NDArray[np.int64]
    token_sizes: NDArray[np.int64]

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where each of `over` ends, int64 [k]."""
        return self.over[:, 1] + self.token_sizes[self.over[:, 0]]


class Vocabulary:
    """Tokens by id, as bytes, made ready for many texts."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self._longest = max(map(len, token_bytes), default=0)
        self.sizes = np.array([len(each) for each in token_bytes], np.int64)
        self._ids = defaultdict[bytes, list[int]](list)
        for number, each in enumerate(token_bytes):
            if each:
                self._ids[each].append(number)
        self._forward = sorted(self._ids)
        self._backward = sorted(each[::-1] for each in self._ids)

    def spelling(self, text: bytes) -> Spelling:
        """How these tokens lie over a text that is not empty."""
        over = {(number, start) for token, start in self._places(text) for number in self._ids[token]}
        return Spelling(len(text), np.array(sorted(over), np.int64).reshape(-1, 2), self.sizes)

    def _places(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        """(token, byte of the text at which it begins) for every way in which a token can lie over the text."""
        size, reach = len(text), min(self._longest, len(text))
        for start in range(size):
            for end in range(start + 1, min(size, start + reach) + 1):
                if text[start:end] in self._ids:
                    yield text[start:end], start
        for end in range(1, min(size, self._longest) + 1):
            for token in _beginning_with(self._backward, text[:end][::-1]):
                if len(token) > end:
                    yield token[::-1], end - len(token)
        for start in range(max(0, size - self._longest), size):
            for token in _beginning_with(self._forward, text[start:]):
                if len(token) > size - start:
                    yield token, start
        if size < self._longest:
            yield from self._around(text)

    def _around(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        """Tokens that hold the whole text with something on both sides; again for each place in them."""
        for token in self._forward:
            place = token.find(text, 1)
            while 0 <= place < len(token) - len(text):
                yield token, -place
                place = token.find(text, place + 1)


class Finder:
    """Finds a text in tokens. sample: tokens of the data, by which it chooses where to begin."""

    def __init__(self, spelling: Spelling, sample: NDArray[np.unsignedinteger]) -> None:
        self._spelling = spelling
        counts = np.bincount(sample, minlength=len(spelling.token_sizes)).astype(np.float64) + 1e-3
        over, ends = spelling.over, spelling.ends
        starts = over[:, 1]
        step = -(-spelling.size // MAX_PIVOTS)
        pivots = range(0, spelling.size, step)
        costs = [counts[over[(starts <= p) & (ends > p), 0]].sum() for p in pivots]
        pivot = pivots[int(np.argmin(costs))]
        self._begin = over[(starts <= pivot) & (ends > pivot)]
        self._is_begin = np.zeros(len(spelling.token_sizes), bool)
        self._is_begin[self._begin[:, 0]] = True
        self._starting = np.sort(self._keys(over[:, 0], starts))
        self._ending = np.sort(self._keys(over[:, 0], ends))

    def find(self, tokens: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
        """Every occurrence as its first and last token, int64 [k, 2], sorted; tokens that the vocabulary lacks must not
        occur.
        """
        places, starts = self._candidates(tokens)
        firsts = self._grown(tokens, places, starts, step=-1)
        lasts = self._grown(tokens, places, starts, step=1)
        found = (firsts >= 0) & (lasts >= 0)
        return np.unique(np.stack([firsts[found], lasts[found]], axis=1), axis=0)

    def _candidates(self, tokens: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that may lie over the pivot, and at which byte of the text each begins."""
        places = np.flatnonzero(self._is_begin[tokens])
        here = tokens[places].astype(np.int64)
        lefts = np.searchsorted(self._begin[:, 0], here, side="left")
        counts = np.searchsorted(self._begin[:, 0], here, side="right") - lefts
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(places, counts), self._begin[np.repeat(lefts, counts) + within, 1]

    def _grown(
        self, tokens: NDArray[np.unsignedinteger], places: NDArray[np.int64], starts: NDArray[np.int64], step: int
    ) -> NDArray[np.int64]:
        """The last token (step 1) or the first (step -1) of the run that each candidate grows into, -1 where the text
        does not go on.
        """
        sizes, size = self._spelling.token_sizes, self._spelling.size
        known = self._starting if step > 0 else self._ending
        reached = np.full(len(places), -1, np.int64)
        # border: the byte of the text up to which the run has come, on the side to which it grows.
        border = starts + (sizes[tokens[places]] if step > 0 else 0)
        alive, at = np.arange(len(places)), places.copy()
        while len(alive):
            done = border >= size if step > 0 else border <= 0
            reached[alive[done]] = at[done]
            alive, at, border = alive[~done], at[~done] + step, border[~done]
            inside = (at >= 0) & (at < len(tokens))
            alive, at, border = alive[inside], at[inside], border[inside]
            here = tokens[at]
            fits = _are_in(known, self._keys(here, border))
            alive, at, border = alive[fits], at[fits], border[fits] + step * sizes[here[fits]]
        return reached

    def _keys(self, tokens: NDArray[np.integer[Any]], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """One number for a token and a byte of the text."""
        return places * len(self._spelling.token_sizes) + tokens


def _are_in(known: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each key is among sorted ones."""
    if not len(known):
        return np.zeros(len(keys), bool)
    found: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys
    return found


def _beginning_with(tokens: Sequence[bytes], prefix: bytes) -> Iterator[bytes]:
    """Those of sorted strings that begin with a prefix."""
    place = bisect_left(tokens, prefix)
    while place < len(tokens) and tokens[place].startswith(prefix):
        yield tokens[place]
        place += 1
