"""What the input was refused for, and going on once it is mended.

Who meets an input that cannot be read notes its piece below `chunks/`. A start that finds such a note may come with
another listing: the claim then follows the input. Chunks are called by what they were made of, so those of files that
stayed are used again; those of the files that were refused, and a tokenizer that was trained here, are made anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.chunk import CHUNKS
from phalanx.data.prepare.inputs import Piece
from phalanx.data.prepare.same import create_same
from phalanx.objects import ObjectStore, StoreDenied

_NOTES = f"{CHUNKS}/refused-"


@dataclass(frozen=True, slots=True)
class Refused:
    """A piece that was refused, and the key of the note."""

    key: str
    piece: Piece


def note_refused(out: ObjectStore, piece: Piece, error: PhalanxError) -> None:
    """Notes that making a piece ended with this error, unless it was the store that refused."""
    if isinstance(error, StoreDenied):
        return
    data = piece.to_json().encode()
    create_same(out, f"{_NOTES}{hashlib.sha256(data).hexdigest()[:32]}.json", data)


def refused_pieces(out: ObjectStore) -> list[Refused]:
    """What earlier starts noted; a note that is damaged stands for no piece."""
    found = []
    for note in out.list(_NOTES):
        try:
            piece = Piece.from_json(out.read(note.key).decode())
        except (ValueError, TypeError):
            piece = Piece(())
        found.append(Refused(note.key, piece))
    return found


def touched_by(refused: Sequence[Refused], pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that hold a file, or a part of one, of a piece that was refused."""
    paths = {span.path for each in refused for span in each.piece.spans}
    return [piece for piece in pieces if any(span.path in paths for span in piece.spans)]
