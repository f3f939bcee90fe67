"""Makes chunks of pieces of tokens. Anybody does it alone; equal pieces, equal bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from phalanx.data.importing.cutting import Documents, by_eos, by_rows
from phalanx.data.importing.files import Files
from phalanx.data.importing.options import Boundaries
from phalanx.data.importing.source import TokenSource
from phalanx.data.prepare import rules
from phalanx.data.prepare.chunk import Chunk, chunk_key, chunk_of_tokens
from phalanx.data.prepare.progress import Figures
from phalanx.data.prepare.same import create_same
from phalanx.objects import ObjectStore

NO_EOS = "documents_without_eos"
_PART_TOKENS = 1 << 24  # a chunk is closed once it has as many
_RULES = (rules.EMPTY, NO_EOS)


@dataclass(frozen=True, slots=True)
class ChunkMaker:
    """Makes the chunks of one piece after the other; many threads may share it."""

    source: TokenSource
    files: Files
    out: ObjectStore
    vocab_size: int
    eos_id: int

    def documents(self, number: int) -> Iterator[Documents]:
        """The documents of a piece, in order."""
        own = self.source.rows(self.files, number, self.vocab_size)
        if self.source.boundaries is Boundaries.ROWS:
            return by_rows(own, self.eos_id)
        following = self.source.following(self.files, number, self.vocab_size)
        return by_eos(own, following, self.eos_id, is_first=self.source.begins_stream(number))

    def make(self, number: int, parts: Collection[int]) -> Figures:
        """Creates the chunks of a piece that are missing; what the piece gave. parts: those that are there already.

        Raises what reading the input and writing to the store raise.
        """
        done = Figures()
        for part, (documents, is_last) in enumerate(_parts(self.documents(number))):
            chunk = None if part in parts else _chunk(documents)
            if chunk is not None:
                create_same(self.out, chunk_key(number, part, is_last=is_last), chunk.encode())
            for each in documents:
                done += Figures(len(each.ids) + each.num_empty, each.num_bytes, len(each.tokens))
        return done


def _parts(found: Iterable[Documents]) -> Iterator[tuple[list[Documents], bool]]:
    """Documents put together into chunks, each with whether it is the last; there is always one."""
    part: list[Documents] = []
    num_tokens = 0
    for documents in found:
        if num_tokens >= _PART_TOKENS:
            yield part, False
            part, num_tokens = [], 0
        part.append(documents)
        num_tokens += len(documents.tokens)
    yield part, True


def _chunk(documents: list[Documents]) -> Chunk:
    tokens = [each.tokens for each in documents] or [np.empty(0, np.uint16)]
    lengths = [each.lengths for each in documents] or [np.empty(0, np.int64)]
    ids = [name for each in documents for name in each.ids]
    num_bytes = sum(each.num_bytes for each in documents)
    chunk = chunk_of_tokens(np.concatenate(tokens), np.concatenate(lengths), ids, num_bytes)
    num_empty = sum(each.num_empty for each in documents)
    flags = chunk.flags.copy()
    if documents:
        flags[np.concatenate([each.is_open for each in documents])] |= 2 << _RULES.index(NO_EOS)
    return replace(
        chunk,
        raw_bytes=np.concatenate([chunk.raw_bytes, np.zeros(num_empty, np.uint64)]),
        flags=np.concatenate([flags, np.full(num_empty, 2 << _RULES.index(rules.EMPTY), np.uint32)]),
        rule_names=_RULES,
    )
