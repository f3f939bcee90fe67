"""Chunks -> shards and manifests: cheap, in the order of the pieces, the same whoever made the chunks.

Two passes. The first fetches digests alone, applies the cap and finds exact copies (`copies`); the second reads chunk
after chunk and hands each document to its split's writer. Then the manifests are written, the training split's last of
all: from that moment the dataset is finished, and the chunks are deleted. Memory: two chunks and a shard of each split,
and one bit a document.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import rules
from phalanx.data.prepare.chunk import CHUNKS, KEPT, Chunk, read_arrays, read_chunk
from phalanx.data.prepare.copies import Bits, CopyFinder
from phalanx.data.prepare.inputs.ahead import ahead
from phalanx.data.prepare.report import HELD_OUT, REPORT_KEY, TRAIN, PrepareReport
from phalanx.data.prepare.same import create_same
from phalanx.data.prepare.tokenizer import TokenizerFacts
from phalanx.data.prepare.writer import SplitWriter
from phalanx.objects import ObjectInfo, ObjectStore

EXAMPLES = 5
_DIGESTS_AHEAD = 8
_CHUNKS_AHEAD = 1
_DELETES_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Cuts:
    """How documents become a dataset; see PrepareSettings. drop_copies: of equal documents only the first stays."""

    shard_tokens: int
    held_out_fraction: float = 0.0
    max_bytes: int | None = None
    drop_copies: bool = True


OnAssembled = Callable[[int, int], None]  # chunks done, of so many


def assemble(
    out: ObjectStore,
    pieces: Sequence[Sequence[ObjectInfo]],
    cuts: Cuts,
    tokenizer: TokenizerFacts,
    recipe: Mapping[str, Any],
    tell: OnAssembled | None = None,
) -> PrepareReport:
    """Makes the dataset in `out` of the chunks of all pieces, in order; continues where an earlier start was killed.

    recipe: what the manifests say of the settings; the input's digest and what was read and dropped are added.
    Raises PhalanxError where no document is left to train on, a chunk is damaged, or `out` holds another dataset.
    """
    taken, copies = _survey(out, pieces, cuts)
    train = SplitWriter(out.within(TRAIN), TRAIN, tokenizer, cuts.shard_tokens)
    held_out = SplitWriter(out.within(HELD_OUT), HELD_OUT, tokenizer, cuts.shard_tokens)
    gathering = _Gathering(train, held_out, _below(cuts.held_out_fraction))
    for number, (part, chunk) in enumerate(_chunks(out, taken), start=1):
        gathering.take(part, chunk, copies)
        if tell is not None:
            tell(number, len(taken))
    train.finish()
    held_out.finish()
    if train.is_empty:
        raise PhalanxError(out.url, expected="at least one document to train on", remedy="lower --held-out-fraction")
    report = _write_manifests(out, train, held_out, tokenizer, {**recipe, **gathering.lineage()}, gathering)
    delete_chunks(out)
    return report


def delete_chunks(out: ObjectStore) -> None:
    """Removes what a finished dataset needs no more."""
    keys = [found.key for found in out.list(f"{CHUNKS}/")]
    for _ in ahead(out.delete, keys, _DELETES_AHEAD):
        pass


def _write_manifests(
    out: ObjectStore,
    train: SplitWriter,
    held_out: SplitWriter,
    tokenizer: TokenizerFacts,
    recipe: dict[str, Any],
    gathering: _Gathering,
) -> PrepareReport:
    """The held-out split, the report, and last the training split, which makes the dataset finished."""
    held_out_summary = None
    held_out_objects: tuple[tuple[str, bytes], ...] = ()
    if not held_out.is_empty:
        held_out_summary, held_out_objects = held_out.manifest(is_held_out=True, recipe=recipe)
    train_summary, train_objects = train.manifest(is_held_out=False, recipe=recipe)
    report = PrepareReport(
        url=out.url,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        documents_read=gathering.num_records,
        bytes_read=gathering.num_bytes,
        counts=dict(gathering.counts),
        train=train_summary,
        held_out=held_out_summary,
        examples={rule: tuple(ids) for rule, ids in sorted(gathering.examples.items())},
    )
    for key, data in held_out_objects:
        create_same(out.within(HELD_OUT), key, data)
    create_same(out, REPORT_KEY, report.encode())
    for key, data in train_objects:
        create_same(out.within(TRAIN), key, data)
    return report


@dataclass(frozen=True, slots=True)
class _Taken:
    """A chunk that goes into the dataset. num_records: how many of its records do (None: all); first_document: how many
    documents lie before it.
    """

    piece: int
    found: ObjectInfo
    num_records: int | None = None
    first_document: int = 0


def _survey(out: ObjectStore, pieces: Sequence[Sequence[ObjectInfo]], cuts: Cuts) -> tuple[list[_Taken], Bits | None]:
    """The first pass: what lies below the cap, and which documents are copies (None: nobody asked)."""
    chunks = [_Taken(number, found) for number, piece in enumerate(pieces) for found in piece]
    if cuts.max_bytes is None and not cuts.drop_copies:
        return chunks, None
    names = ["digests"] + (["raw_bytes", "flags"] if cuts.max_bytes is not None else [])
    taken: list[_Taken] = []
    num_bytes = num_documents = 0
    fetched = ahead(lambda chunk: read_arrays(out, chunk.found, names), chunks, _DIGESTS_AHEAD)
    with CopyFinder() as finder:
        for chunk, arrays in zip(chunks, fetched, strict=False):
            digests, num_records, is_end = arrays["digests"], None, False
            if cuts.max_bytes is not None:
                totals = num_bytes + np.cumsum(arrays["raw_bytes"], dtype=np.int64)
                num_records = int(np.searchsorted(totals, cuts.max_bytes, side="right"))
                is_end = num_records < len(totals)
                digests = digests[: np.count_nonzero(arrays["flags"][:num_records] & KEPT)]
                num_bytes = int(totals[-1]) if len(totals) else num_bytes
            taken.append(_Taken(chunk.piece, chunk.found, num_records, num_documents))
            num_documents += len(digests)
            if cuts.drop_copies:
                finder.add(digests)
            if is_end:
                fetched.close()
                break
        return taken, finder.copies() if cuts.drop_copies else None


def _chunks(out: ObjectStore, taken: Sequence[_Taken]) -> Iterator[tuple[_Taken, Chunk]]:
    fetched = ahead(lambda chunk: read_chunk(out, chunk.found.key), taken, _CHUNKS_AHEAD)
    yield from zip(taken, fetched, strict=True)


def _below(fraction: float) -> np.uint64:
    """The number that digests of held-out documents lie below; exact, as `reading.is_held_out` has it."""
    numerator, denominator = (fraction * 2.0**64).as_integer_ratio()
    return np.uint64(-(-numerator // denominator))


@dataclass(slots=True)
class _Gathering:
    """The second pass: hands documents to the writers and counts."""

    train: SplitWriter
    held_out: SplitWriter
    held_out_below: np.uint64
    counts: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys((*rules.DROPPED, *rules.MENDED, rules.LONG), 0))
    )
    examples: dict[str, list[str]] = field(default_factory=dict)
    num_records: int = 0
    num_bytes: int = 0
    _input: Any = field(default_factory=hashlib.sha256)
    _piece: int = -1
    _path: str = ""
    _lines_before: int = 0
    _lines: int = 0

    def lineage(self) -> dict[str, Any]:
        """What the manifest says of the input: SHA-256 over the digests of the documents kept, in order; totals."""
        return {
            "input_digest": f"sha256:{self._input.hexdigest()}",
            "documents_read": self.num_records,
            "bytes_read": self.num_bytes,
            "counts": dict(self.counts),
        }

    def take(self, part: _Taken, chunk: Chunk, copies: Bits | None) -> None:
        """The next chunk."""
        self._count_lines(part.piece, chunk)
        stop = len(chunk.flags) if part.num_records is None else part.num_records
        records = np.flatnonzero(chunk.flags[:stop] & KEPT)
        is_copy = np.zeros(len(records), np.bool_)
        if copies is not None:
            is_copy = copies.range(part.first_document, part.first_document + len(records))
        ids = chunk.document_ids(self._lines_before)
        self._count(chunk, stop, records[is_copy], [ids[number] for number in np.flatnonzero(is_copy)[:EXAMPLES]])
        self._input.update(chunk.digests[: len(records)][~is_copy].tobytes())
        self._write(chunk, np.flatnonzero(~is_copy), ids)

    def _write(self, chunk: Chunk, documents: NDArray[np.intp], ids: Sequence[str]) -> None:
        ends = np.cumsum(chunk.lengths, dtype=np.int64).tolist()
        numbers = np.ascontiguousarray(chunk.digests[:, :8]).view(">u8")[:, 0]
        is_held_out = (numbers < self.held_out_below).tolist()
        for number in documents.tolist():
            writer = self.held_out if is_held_out[number] else self.train
            tokens = chunk.tokens[ends[number - 1] if number else 0 : ends[number]]
            writer.add(ids[number], tokens)
            if len(tokens) > rules.LONG_DOCUMENT_TOKENS:
                self.counts[rules.LONG] += 1
                self._show(rules.LONG, ids[number])

    def _count(self, chunk: Chunk, stop: int, copies: NDArray[np.intp], copied_ids: Sequence[str]) -> None:
        self.num_records += stop
        self.num_bytes += int(chunk.raw_bytes[:stop].sum(dtype=np.int64))
        self.counts.update(chunk.counts(0, stop))
        self.counts[rules.DUPLICATE] += len(copies)
        if rules.ESCAPED_ID in chunk.rule_names:  # ids of what is not in the dataset don't count
            bit = 2 << chunk.rule_names.index(rules.ESCAPED_ID)
            self.counts[rules.ESCAPED_ID] -= int(np.count_nonzero(chunk.flags[copies] & bit))
        for rule, document_id in [
            *((e.rule, e.full_id(chunk.path, self._lines_before)) for e in chunk.examples if e.record < stop),
            *((rules.DUPLICATE, document_id) for document_id in copied_ids),
        ]:
            self._show(rule, document_id)

    def _show(self, rule: str, document_id: str) -> None:
        shown = self.examples.setdefault(rule, [])
        if len(shown) < EXAMPLES:
            shown.append(document_id)

    def _count_lines(self, piece: int, chunk: Chunk) -> None:
        """Pieces of one file follow each other, and their lines are counted on."""
        if piece != self._piece:
            self._lines_before = self._lines_before + self._lines if chunk.path and chunk.path == self._path else 0
            self._piece, self._path = piece, chunk.path
        self._lines = chunk.num_lines
