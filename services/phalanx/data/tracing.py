"""From a step to the documents in its batch, and from a document or a text to the steps that see it, by the order
alone: no shard is read, but for the text that is looked for or shown.

Windows that the journal takes out of training are told with weight 0: they keep their place, but no step learns from
them. Steps are those of the live lineage; what a fork's origin read before it belongs to that job, and is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PhalanxError
from phalanx.data.text_search import find_text
from phalanx.lineage import ForkPoint, position_after
from phalanx.objects import ObjectStore, StorageSettings
from phalanx.stream.documents import Document, Documents
from phalanx.stream.ids import find_id, read_ids
from phalanx.stream.manifest import Split
from phalanx.stream.mixture import NOWHERE
from phalanx.stream.order import Order
from phalanx.stream.token_text import TokenText, find_tokenizer
from phalanx.stream.view import View

SHOWN_CHARACTERS = 120
MOST_TOKENS: Final = 1 << 60  # of a step and all before it: positions, and sums of them, stay far within 64 bits
MOST_EPOCHS: Final = 10_000
_TOKENS_BEFORE = 8

# How far a question is: what is counted, how many are done, of how many.
OnTraced: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class TracedSource:
    """A split that a job reads, in its own order. settings: how its bucket is reached."""

    name: str
    store: ObjectStore
    split: Split
    order: Order
    settings: StorageSettings | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Which windows a job's steps read: batch after batch from its beginning, a fork's from where its origin stood.
    last: the step that it ends at, None where it goes on for ever.
    """

    global_batch_size: int
    origin: ForkPoint | None = None
    last: int | None = None

    def windows(self, step: int, seq_len: int = 1) -> range:
        """The windows of a step, of seq_len tokens each; raises PhalanxError for one that is not the job's, and one
        with more than MOST_TOKENS up to its end.
        """
        first = 0 if self.origin is None else self.origin.step
        if step <= first:
            other = "" if self.origin is None else f": the steps up to {first} are those of job {self.origin.uid}"
            raise PhalanxError(
                "--step", value=step, expected=f"{first + 1} or more", remedy=f"steps are counted from 1{other}"
            )
        windows = range(*(position_after(done, self.global_batch_size, self.origin) for done in (step - 1, step)))
        if windows.stop * seq_len > MOST_TOKENS:
            most = first + (MOST_TOKENS // seq_len - self.first_window) // self.global_batch_size
            ends = "" if self.last is None else f"the job ends at step {self.last:,}; "
            raise PhalanxError(
                "--step",
                value=step,
                expected=f"{most:,} or less, which is {MOST_TOKENS:,} tokens",
                remedy=f"{ends}name a step that it trains",
            )
        return windows

    def step_of(self, window: int) -> int:
        """The step that reads a window of the job's own."""
        start = self.first_window
        assert window >= start
        return (window - start) // self.global_batch_size + 1 + (0 if self.origin is None else self.origin.step)

    @property
    def first_window(self) -> int:
        """Where the job's own reading begins."""
        return 0 if self.origin is None else self.origin.position


@dataclass(frozen=True, slots=True)
class TracedSegment:
    """A part of a document in a window. window: its position on the grid; weight: 0 where the journal takes the window
    out; document: its number in the shard; offset: of its first token in the member; text: what it says, where that was
    asked for.
    """

    window: int
    weight: int
    source: str
    document_id: str
    shard: str
    document: int
    member: int
    offset: int
    length: int
    starts_document: bool
    ends_document: bool
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One pass of a source over a document: the windows that hold its tokens, the steps that train on them, and which
    of the windows the journal takes out. Without windows where the job never gets there.
    """

    epoch: int
    source: str
    document_id: str
    shard: str
    document: int
    windows: tuple[int, ...]
    steps: tuple[int, ...]
    left_out: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TracedText:
    """Documents that say a text. count: occurrences in each; is_all: whether there are no more documents."""

    visits: tuple[TracedVisit, ...]
    documents: int
    occurrences: int
    is_all: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """A document of a source. token: where to begin when it is shown."""

    source: int
    shard: int
    document: int
    token: int = 0


class Tracer:
    """Answers for the sources of a job. view: which window of which source lies where, and what is taken out. shows:
    whether what is found is decoded too. told: hears how far a question is. Raises OutsideError where ids, or tokens
    that are needed, are damaged or missing.
    """

    def __init__(
        self,
        sources: Sequence[TracedSource],
        steps: Steps,
        view: View | None = None,
        *,
        shows: bool = False,
        told: OnTraced | None = None,
    ) -> None:
        self._sources, self._steps, self._view = tuple(sources), steps, view or View()
        self._told = told or (lambda what, done, total: None)
        self._documents = [_documents_of(each) for each in sources] if shows else None
        self._ids = lru_cache(maxsize=16)(self._read_ids)

    @property
    def is_mixture(self) -> bool:
        """Whether the job has several sources."""
        return len(self._sources) > 1

    @property
    def last_step(self) -> int | None:
        """The step that the job ends at, None where it goes on for ever."""
        return self._steps.last

    def step(self, step: int) -> Iterator[TracedSegment]:
        """Every segment of global batch `step`, window by window; raises PhalanxError for a step that never comes."""
        windows = self._steps.windows(step, max(source.order.seq_len for source in self._sources))
        if self._view.end is not None and windows.stop > self._view.end:
            raise PhalanxError(
                "--step", value=step, expected="a step of the job", remedy="the sources have run out before it"
            )
        positions = np.arange(windows.start, windows.stop, dtype=np.int64)
        sources, places = self._view.place(positions)
        columns = (positions, sources, places, self._view.left_out(positions))
        for row in zip(*(column.tolist() for column in columns), strict=True):
            yield from self._window(*row)

    def document(self, document_id: str, num_epochs: int) -> Iterator[TracedVisit]:
        """When the documents of this id are seen in the first epochs; raises PhalanxError where no source has one, and
        for more than MOST_EPOCHS.
        """
        _require_epochs(num_epochs)
        places = [
            _Place(number, *place)
            for number, source in enumerate(self._sources)
            for place in find_id(source.store, source.split, document_id, self._told_shards(source))
        ]
        if not places:
            raise PhalanxError(
                "--document",
                value=document_id,
                expected=f"the id of a document in {', '.join(each.split.url for each in self._sources)}",
                remedy="`phalanx data trace JOB --step N` shows ids; it may also lie in the held-out split",
            )
        return self._visits(places, num_epochs)

    def text(self, text: str, num_epochs: int, limit: int) -> TracedText:
        """When the first `limit` documents that say `text` are seen; raises PhalanxError where none does, or where the
        tokenizer is not there, and for more than MOST_EPOCHS.
        """
        _require_epochs(num_epochs)
        limit = min(limit, sum(source.split.num_documents for source in self._sources))
        found = list(islice(self._saying(text), limit + 1))
        if not found:
            raise PhalanxError(
                "--text",
                value=text[:SHOWN_CHARACTERS],
                expected=f"what a document in {', '.join(each.split.url for each in self._sources)} says",
                remedy="upper and lower case and white space count; it may also lie in the held-out split",
            )
        shown = found[:limit]
        visits = self._visits([place for place, _ in shown], num_epochs)
        return TracedText(tuple(visits), len(shown), sum(count for _, count in shown), len(found) <= limit)

    def _window(self, position: int, source: int, window: int, is_left_out: bool) -> Iterator[TracedSegment]:
        traced = self._sources[source]
        for segment in traced.order.segments(window):
            yield TracedSegment(
                window=position,
                weight=0 if is_left_out else 1,
                source=traced.name,
                document_id=self._ids(source, segment.shard)[segment.document],
                shard=traced.split.shard(segment.shard).name,
                document=segment.document,
                member=segment.member,
                offset=segment.offset,
                length=segment.length,
                starts_document=segment.starts_document,
                ends_document=segment.ends_document,
                text=self._segment_text(source, segment.shard, segment.document, segment.offset, segment.length),
            )

    def _saying(self, text: str) -> Iterator[tuple[_Place, int]]:
        for number, source in enumerate(self._sources):
            told = self._told_shards(source)
            for match in find_text(source.store, source.split, tokenizer_of(source), text, told):
                yield _Place(number, match.shard, match.document, match.token or 0), match.count

    def _told_shards(self, source: TracedSource) -> Callable[[int], None]:
        what, total = f"shards of {source.name}" if self.is_mixture else "shards", source.split.num_shards
        return lambda done: self._told(what, done, total)

    def _visits(self, places: Sequence[_Place], num_epochs: int) -> Iterator[TracedVisit]:
        """Epoch by epoch; within one, documents of one block are looked up together, and told in the order given."""
        for epoch in range(num_epochs):
            blocks = [self._sources[each.source].order.span_of_block(epoch, each.shard) for each in places]
            by_block = sorted(range(len(places)), key=lambda row: (places[row].source, blocks[row]))
            visits = {row: self._visit(places[row], epoch) for row in by_block}
            self._told("passes", epoch + 1, num_epochs)
            yield from (visits[row] for row in range(len(places)))

    def _visit(self, place: _Place, epoch: int) -> TracedVisit:
        source = self._sources[place.source]
        own = source.order.positions_of(epoch, place.shard, place.document)
        windows = self._positions(place.source, np.arange(own.start, own.stop, dtype=np.int64))
        return TracedVisit(
            epoch=epoch,
            source=source.name,
            document_id=self._ids(place.source, place.shard)[place.document],
            shard=source.split.shard(place.shard).name,
            document=place.document,
            windows=tuple(windows.tolist()),
            steps=tuple(sorted({self._steps.step_of(window) for window in windows.tolist()})),
            left_out=tuple(windows[self._view.left_out(windows)].tolist()),
            text=self._document_text(place),
        )

    def _positions(self, source: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of a source's windows, without those that this job never reads."""
        positions = self._view.mixture.positions(source, windows)
        return np.sort(positions[(positions != NOWHERE) & (positions >= self._steps.first_window)])

    def _document_text(self, place: _Place) -> str | None:
        if self._documents is None:
            return None
        document = self._documents[place.source].at(place.shard, place.document)
        return _shortened(document, max(0, place.token - _TOKENS_BEFORE), document.num_tokens)

    def _segment_text(self, source: int, shard: int, document: int, offset: int, length: int) -> str | None:
        if self._documents is None:
            return None
        documents = self._documents[source]
        start = offset - documents.place_of(shard, document)[1]
        return _shortened(documents.at(shard, document), start, start + length)

    def _read_ids(self, source: int, shard: int) -> list[str]:
        return read_ids(self._sources[source].store, self._sources[source].split, shard)


def _require_epochs(num_epochs: int) -> None:
    if num_epochs > MOST_EPOCHS:
        raise PhalanxError(
            "--epochs",
            value=num_epochs,
            expected=f"{MOST_EPOCHS:,} passes or fewer",
            remedy="2 is enough to see that each pass has its own order; --step tells what any later step reads",
        )


def tokenizer_of(source: TracedSource) -> TokenText:
    """The tokenizer of a source; raises PhalanxError where it is not with the data."""
    found = find_tokenizer(source.store, source.split.tokenizer_digest, source.settings)
    if found is None:
        raise _no_tokenizer(source)
    return found


def _documents_of(source: TracedSource) -> Documents:
    documents = Documents(source.store, source.split, source.settings)
    if documents.tokenizer is None:
        raise _no_tokenizer(source)
    return documents


def _no_tokenizer(source: TracedSource) -> PhalanxError:
    return PhalanxError(
        f"{source.split.url}/tokenizer.json",
        expected="the tokenizer of the split, in its folder or the one above",
        remedy="copy it there: without it nobody can say what the tokens mean",
    )


def _shortened(document: Document, start: int, stop: int) -> str | None:
    """The first characters that tokens [start, stop) of a document say; None without the tokenizer."""
    # A token that says less than half a character is none: so many tokens are enough.
    text = document.said(start, min(stop, start + 2 * SHOWN_CHARACTERS))
    return text if text is None or len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
