"""Documents of an input in order, one after the other, as the dataset will hold them: cap, text rules and copies
applied. For what needs the first documents alone: whether there is text to train on, and the tokenizer's training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import rules
from phalanx.data.prepare.chunk import content_digest
from phalanx.data.prepare.inputs import Piece
from phalanx.data.prepare.inputs.documents import BROKEN, INVALID_UTF8, NO_TEXT
from phalanx.data.prepare.progress import Figures
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import Source

_MORE_TEXT = "lower --held-out-fraction or give more documents"
_REMEDIES = {
    rules.ZERO_BYTES: "are files of 0 bytes: check the path",
    BROKEN: "are broken records: check what wrote them",
    NO_TEXT: "have no text in {field!r}: name the field that holds it with --text-field",
    INVALID_UTF8: "are not UTF-8: convert them, as with iconv",
    rules.EMPTY: "are white space only: check the path",
    rules.TOO_SHORT: "are shorter than --min-chars {least}: lower it",
    rules.TOO_LONG: "are longer than --max-chars {most}: raise it",
}


class OrderedReading:
    """One pass. figures: what was read so far; counts: by rule; piece: the one at hand; is_cut: the cap ended it."""

    def __init__(self, source: Source, pieces: Sequence[Piece], settings: PrepareSettings) -> None:
        self._source, self._pieces, self._settings = source, pieces, settings
        self._seen: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        self.figures = Figures()
        self.any_kept = False
        self.is_cut = False
        self.piece: Piece | None = None

    def training_texts(self) -> Iterator[bytes]:
        """Texts of the documents of the training split, in order."""
        for text in self._texts():
            digest = content_digest(text)
            if digest in self._seen:
                self.counts[rules.DUPLICATE] += 1
                continue
            self._seen.add(digest)
            self.any_kept = True
            if not is_held_out(digest, self._settings.held_out_fraction):
                yield text

    def _texts(self) -> Iterator[bytes]:
        cap = self._settings.max_bytes
        for piece in self._pieces:
            self.piece = piece
            for raw in self._source.read(piece):
                if cap is not None and self.figures.num_bytes + raw.num_bytes > cap:
                    self.is_cut = True
                    return
                self.figures += Figures(1, raw.num_bytes)
                text = rules.clean(raw, self.counts, self._settings.lengths)
                if text is not None:
                    yield text


def is_held_out(content_digest: bytes, fraction: float) -> bool:
    """Whether a document goes to the held-out split: its content's hash, as a number from 0 to 1, lies below
    `fraction`.
    """
    return int.from_bytes(content_digest[:8], "big") < fraction * 2.0**64


def check_any_text(source: Source, pieces: Sequence[Piece], settings: PrepareSettings) -> None:
    """Raises PhalanxError where no document would be kept for training."""
    reading = OrderedReading(source, pieces, settings)
    if next(reading.training_texts(), None) is None:
        dropped = ", ".join(f"{reading.counts[name]} {name}" for name in rules.DROPPED if reading.counts[name])
        found = f" (dropped: {dropped})" if dropped else ""
        raise PhalanxError(
            str(source.root) or "the input",
            expected=f"at least one document with text to train on{found}",
            remedy=_remedy(source, reading, settings),
        )


def _remedy(source: Source, reading: OrderedReading, settings: PrepareSettings) -> str:
    """What helps an input of which nothing is left: by the rule that dropped most of it."""
    if reading.any_kept:
        return _MORE_TEXT
    if reading.is_cut:
        return f"no text lies before --max-bytes {settings.max_bytes}: raise it"
    name, count = max(((name, reading.counts[name]) for name in rules.DROPPED), key=lambda each: each[1])
    if not count:
        return "it holds no document: check the path"
    lengths = settings.lengths
    remedy = _REMEDIES[name].format(field=source.fields.text, least=lengths.min_chars, most=lengths.max_chars)
    return f"{count:,} of {reading.figures.num_records:,} documents {remedy}"
