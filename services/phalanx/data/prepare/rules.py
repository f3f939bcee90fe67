"""The written rules for odd text: what is dropped, what is mended, and the count of each. Pure.

Dropped: a 0-byte file; a .jsonl line without a string `text`; text that is not UTF-8 (a wrong guess at the encoding
would teach the model garbage); text with nothing but white space; an exact copy of an earlier document. Mended: a
byte-order mark at the start is removed; CRLF becomes LF; NUL characters are removed. Kept whole, and counted: a
document of more than 10 million tokens. The same rules hold for files and for records of a .jsonl file. Copies are
found after mending, so CRLF alone makes no difference.

An id that is not valid Unicode (a file name that is not UTF-8, a lone surrogate in a JSON string) is escaped: each lone
surrogate becomes the six characters of its `\\udcff` form, so the same input always gives the same id.
"""

from __future__ import annotations

from collections import Counter

from phalanx.data.prepare.sources import RawDocument

ZERO_BYTES = "zero_byte_files"
NO_TEXT = "records_without_text"
INVALID_UTF8 = "invalid_utf8"
EMPTY = "empty_documents"
DUPLICATE = "exact_duplicates"
DROPPED = (ZERO_BYTES, NO_TEXT, INVALID_UTF8, EMPTY, DUPLICATE)

BYTE_ORDER_MARK = "byte_order_marks_removed"
CRLF = "crlf_documents"
NUL = "nul_documents"
ESCAPED_ID = "ids_escaped"
LONG = "documents_over_10m_tokens"
MENDED = (BYTE_ORDER_MARK, CRLF, NUL, ESCAPED_ID)
LONG_DOCUMENT_TOKENS = 10_000_000


def clean(document: RawDocument, counts: Counter[str]) -> bytes | None:
    """The document's text by the rules, as UTF-8, or None where it is dropped; counts what was done."""
    text = _decoded(document, counts)
    if text is None:
        return None
    mended = text.removeprefix("\ufeff")
    counts[BYTE_ORDER_MARK] += mended != text
    counts[CRLF] += "\r\n" in mended
    counts[NUL] += "\0" in mended
    mended = mended.replace("\r\n", "\n").replace("\0", "")
    if not mended.strip():
        counts[EMPTY] += 1
        return None
    return mended.encode()


def clean_id(document_id: str, counts: Counter[str]) -> str:
    """The id by the rules; counts it where it had to be escaped."""
    escaped = document_id.encode(errors="backslashreplace").decode()
    counts[ESCAPED_ID] += escaped != document_id
    return escaped


def _decoded(document: RawDocument, counts: Counter[str]) -> str | None:
    if document.text is None:
        counts[NO_TEXT] += 1
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
