"""Makes chunks of pieces: text rules, content digests, tokens. Any process does it alone; equal pieces, equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import rules
from phalanx.data.prepare.chunk import ChunkBuilder, chunk_key, content_digest
from phalanx.data.prepare.claim import missing_tokenizer
from phalanx.data.prepare.inputs import Piece, RawDocument
from phalanx.data.prepare.progress import Figures
from phalanx.data.prepare.refused import note_refused
from phalanx.data.prepare.rules import ANY_LENGTH, Lengths
from phalanx.data.prepare.same import create_same
from phalanx.data.prepare.sources import Source
from phalanx.data.prepare.tokenizer import TextTokenizer, load_tokenizer
from phalanx.objects import ObjectMissing, ObjectStore, open_store

TOKENIZER_KEY = "tokenizer.json"
PART_BYTES, PART_RECORDS = 8 << 20, 1 << 16  # of one chunk, which is in memory as a whole: large pieces give several
BATCH_DOCUMENTS = 1024
BATCH_BYTES = 1 << 18  # in memory as strings a token while they are encoded: a hundred bytes a token and more


def piece_name(piece: Piece, tokenizer_digest: str) -> str:
    """What the chunks of a piece are called: it follows from names, sizes and ranges of its files and the tokenizer, so
    they are found again where another file of the input was replaced.
    """
    about = json.dumps([PART_BYTES, PART_RECORDS, tokenizer_digest, piece.to_json()])
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def piece_names(pieces: Iterable[tuple[int, Piece]], tokenizer_digest: str) -> dict[str, int]:
    """Numbers of pieces by what their chunks are called."""
    return {piece_name(piece, tokenizer_digest): number for number, piece in pieces}


@dataclass(frozen=True, slots=True)
class Task:
    """A piece to be made, by its number in the input. parts: numbers of its chunks that are there already."""

    number: int
    piece: Piece
    parts: Collection[int] = ()

    def to_json(self) -> str:
        """ASCII that `from_json` turns back into this task."""
        return json.dumps({"number": self.number, "piece": self.piece.to_json(), "parts": sorted(self.parts)})

    @staticmethod
    def from_json(text: str) -> Task:
        """The task that `to_json` gave."""
        found = json.loads(text)
        return Task(found["number"], Piece.from_json(found["piece"]), found["parts"])


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """What another process needs to make chunks of one preparation; its tokenizer lies in `out_url`."""

    out_url: str
    source: Source
    eos_token: str
    max_bytes: int | None = None
    lengths: Lengths = ANY_LENGTH

    def to_json(self) -> str:
        """ASCII that `from_json` turns back into this order, without the source's listing."""
        return json.dumps(
            {
                "out_url": self.out_url,
                "source": self.source.without_listing().to_json(),
                "eos_token": self.eos_token,
                "max_bytes": self.max_bytes,
                "lengths": asdict(self.lengths),
            }
        )

    @staticmethod
    def from_json(text: str) -> WorkOrder:
        """The order that `to_json` gave."""
        found = json.loads(text)
        return WorkOrder(
            found["out_url"],
            Source.from_json(found["source"]),
            found["eos_token"],
            found["max_bytes"],
            Lengths(**found["lengths"]),
        )

    def maker(self, out: ObjectStore | None = None) -> ChunkMaker:
        """Opens the store (unless `out` is given) and loads the tokenizer. Raises PhalanxError where there is none."""
        store = open_store(self.out_url) if out is None else out
        try:
            data = store.read(TOKENIZER_KEY)
        except ObjectMissing as error:
            raise missing_tokenizer(store) from error
        return ChunkMaker(self, store, load_tokenizer(data, self.eos_token, f"{store.url}/{TOKENIZER_KEY}"))


class ChunkMaker:
    """Makes the chunks of one piece after the other."""

    def __init__(self, order: WorkOrder, out: ObjectStore, tokenizer: TextTokenizer) -> None:
        self._order, self._out, self._tokenizer = order, out, tokenizer

    def make(self, task: Task, tell: Callable[[Figures], None] | None = None) -> Figures:
        """Creates the chunks of a piece that are missing; what the piece gave.

        Records behind the first that passes the cap are left out: wherever the piece begins, they lie beyond it.
        Raises what reading the input and writing to the store raise; that the input was refused is noted in the store.
        """
        try:
            return self._make(task, tell)
        except PhalanxError as error:
            note_refused(self._out, task.piece, error)
            raise

    def _make(self, task: Task, tell: Callable[[Figures], None] | None) -> Figures:
        reading, done, cap = self._order.source.read(task.piece), Figures(), self._order.max_bytes
        path, part = task.piece.part_of or "", 0
        made = self._part(task, path, part)
        for raw in reading:
            if made.figures.num_bytes >= PART_BYTES or made.figures.num_records >= PART_RECORDS:
                done += self._close(made, task, part, made.num_lines, is_last=False)
                part += 1
                made = self._part(task, path, part)
            made.add(raw)
            if tell is not None and made.has_news():
                tell(done + made.figures)
            if cap is not None and done.num_bytes + made.figures.num_bytes > cap:
                break
        return done + self._close(made, task, part, reading.num_lines, is_last=True)

    def _part(self, task: Task, path: str, part: int) -> _Part:
        return _Part(self._tokenizer, self._order.lengths, path, is_there=part in task.parts)

    def _close(self, made: _Part, task: Task, part: int, num_lines: int, *, is_last: bool) -> Figures:
        if not made.is_there:
            name = piece_name(task.piece, self._tokenizer.facts.digest)
            create_same(self._out, chunk_key(name, part, is_last=is_last), made.finish(num_lines))
        return made.figures


class _Part:
    """One chunk in the making. is_there: an earlier start made it, so its records are only counted."""

    def __init__(self, tokenizer: TextTokenizer, lengths: Lengths, path: str, *, is_there: bool) -> None:
        self._tokenizer, self._lengths, self.is_there = tokenizer, lengths, is_there
        self._builder = ChunkBuilder(tokenizer.dtype, rules.clean_id(path, Counter()))
        self._pending: list[tuple[RawDocument, str, bytes]] = []
        self._pending_bytes = 0
        self._told = Figures()
        self.figures = Figures()
        self.num_lines = 0

    def add(self, raw: RawDocument) -> None:
        """Takes the next record."""
        self.figures += Figures(1, raw.num_bytes)
        self.num_lines = raw.line or 0
        if self.is_there:
            return
        counts: Counter[str] = Counter()
        text = rules.clean(raw, counts, self._lengths)
        document_id = rules.clean_id(raw.id, Counter() if text is None else counts)
        applied = [name for name, count in counts.items() if count]
        self._builder.record(raw.num_bytes, applied, is_kept=text is not None, record_id=document_id, line=raw.line)
        if text is None:
            return
        self._pending.append((raw, document_id, text))
        self._pending_bytes += len(text)
        if len(self._pending) >= BATCH_DOCUMENTS or self._pending_bytes >= BATCH_BYTES:
            self._encode()

    def has_news(self) -> bool:
        """Whether more was tokenised since the last call."""
        before, self._told = self._told, self.figures
        return before.num_tokens != self.figures.num_tokens

    def finish(self, num_lines: int) -> bytes:
        """The chunk's bytes."""
        self._encode()
        return self._builder.finish(num_lines).encode()

    def _encode(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        all_tokens = self._tokenizer.encode([text for _, _, text in pending])
        for (raw, document_id, text), tokens in zip(pending, all_tokens, strict=True):
            self._builder.add(document_id, tokens, content_digest(text), raw.line)
            self.figures += Figures(num_tokens=len(tokens))
