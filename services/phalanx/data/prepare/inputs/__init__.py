"""Where documents come from: files of every kind we read, on disks and in object storage, in one deterministic order.

A listing (names and sizes) is cut into `Piece`s; each piece is read alone, by any process, as a stream of documents.
"""

from phalanx.data.prepare.inputs.documents import Fields, RawDocument
from phalanx.data.prepare.inputs.errors import ChangedInput, CorruptInput
from phalanx.data.prepare.inputs.formats import TEXT_SUFFIXES, Format, Kind, format_of
from phalanx.data.prepare.inputs.pieces import InputFile, Piece, Span, cut, piece_bytes_for

__all__ = [
    "TEXT_SUFFIXES",
    "ChangedInput",
    "CorruptInput",
    "Fields",
    "Format",
    "InputFile",
    "Kind",
    "Piece",
    "RawDocument",
    "Span",
    "cut",
    "format_of",
    "piece_bytes_for",
]
