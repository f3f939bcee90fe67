"""The written rules for odd text: what is dropped, what is mended, and the count of each. Pure.

Dropped: a 0-byte file; a record without text (no such field, a null, anything but a string; a sample of a tar without a
text member); a record that cannot be parsed (a broken line of a .jsonl file); text that is not UTF-8 (a wrong guess at
the encoding would teach the model garbage); text with nothing but white space; text shorter or longer than asked for;
an exact copy of an earlier document. Mended: a byte-order mark at the start is removed; CRLF becomes LF; NUL characters
are removed. Kept whole, and counted: a document of more than 10 million tokens. The same rules hold for files, lines of
a .jsonl file, rows of a parquet file and members of a tar. Copies are found, and lengths taken, after mending, so CRLF
alone makes no difference.

An id that is not valid Unicode (a file name that is not UTF-8, a lone surrogate in a JSON string) is escaped: each lone
surrogate becomes the six characters of its `\\udcff` form, so the same input always gives the same id. A record
without the id field that was asked for is called by its place, and counted.

Odd documents are counted; an input file that is damaged, cut or changed is an error (`inputs.errors`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs.documents import BROKEN, INVALID_UTF8, NO_TEXT, RawDocument

ZERO_BYTES = "zero_byte_files"
EMPTY = "empty_documents"
TOO_SHORT = "too_short"
TOO_LONG = "too_long"
DUPLICATE = "exact_duplicates"
DROPPED = (ZERO_BYTES, BROKEN, NO_TEXT, INVALID_UTF8, EMPTY, TOO_SHORT, TOO_LONG, DUPLICATE)

BYTE_ORDER_MARK = "byte_order_marks_removed"
CRLF = "crlf_documents"
NUL = "nul_documents"
ESCAPED_ID = "ids_escaped"
NO_ID = "records_without_id"
LONG = "documents_over_10m_tokens"
MENDED = (BYTE_ORDER_MARK, CRLF, NUL, ESCAPED_ID, NO_ID)
LONG_DOCUMENT_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Which documents are kept by their length in characters (Unicode code points of the mended text; bounds count in).

    None: no bound.
    """

    min_chars: int | None = None
    max_chars: int | None = None

    def check(self) -> None:
        """Raises PhalanxError for bounds that no document can keep."""
        for option, value in (("--min-chars", self.min_chars), ("--max-chars", self.max_chars)):
            if value is not None and value < 1:
                raise PhalanxError(option, value=value, expected="1 or more", remedy="raise it or leave it out")
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            raise PhalanxError(
                "--min-chars", value=self.min_chars, expected=f"at most --max-chars {self.max_chars}", remedy="lower it"
            )


ANY_LENGTH = Lengths()


def clean(document: RawDocument, counts: Counter[str], lengths: Lengths = ANY_LENGTH) -> bytes | None:
    """The document's text by the rules, as UTF-8, or None where it is dropped; counts what was done."""
    text = _decoded(document, counts)
    if text is None:
        return None
    mended = text.removeprefix("\ufeff")
    counts[BYTE_ORDER_MARK] += mended != text
    if "\r\n" in mended:
        counts[CRLF] += 1
        mended = mended.replace("\r\n", "\n")
    if "\0" in mended:
        counts[NUL] += 1
        mended = mended.replace("\0", "")
    unfit = _unfit(mended, lengths)
    if unfit:
        counts[unfit] += 1
        return None
    counts[NO_ID] += document.lacks_id
    return mended.encode()


def _unfit(text: str, lengths: Lengths) -> str | None:
    """Why a text is dropped, as the name of its count."""
    if not text.strip():
        return EMPTY
    if lengths.min_chars is not None and len(text) < lengths.min_chars:
        return TOO_SHORT
    if lengths.max_chars is not None and len(text) > lengths.max_chars:
        return TOO_LONG
    return None


def clean_id(document_id: str, counts: Counter[str]) -> str:
    """The id by the rules; counts it where it had to be escaped."""
    escaped = document_id.encode(errors="backslashreplace").decode()
    counts[ESCAPED_ID] += escaped != document_id
    return escaped


def _decoded(document: RawDocument, counts: Counter[str]) -> str | None:
    if document.text is None:
        counts[document.problem] += 1
        return None
    if isinstance(document.text, bytes) and not document.text:
        counts[ZERO_BYTES] += 1
        return None
    try:
        if isinstance(document.text, bytes):
            return document.text.decode()
        document.text.encode()  # a JSON string may hold lone surrogates, which no UTF-8 text can
    except UnicodeError:
        counts[INVALID_UTF8] += 1
        return None
    return document.text
