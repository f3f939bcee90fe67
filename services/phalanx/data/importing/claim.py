"""What an import was begun with: its settings in `recipe.json`, the pieces of its input in `input.json`; written before
anything else, so that nobody goes on with other settings or another input in the same folder.
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.core.digest import canonical_json
from phalanx.core.errors import PhalanxError
from phalanx.data.importing.settings import RECIPE_FORMAT
from phalanx.data.importing.source import Piece, TokenSource, pieces_of
from phalanx.data.prepare.claim import INPUT_KEY, RECIPE_KEY, damaged_claim, require_same_recipe
from phalanx.data.prepare.same import create_same
from phalanx.objects import ObjectMissing, ObjectStore

_ASSEMBLED = {  # what assembling takes from a recipe
    "tokenizer_digest": (str,),
    "vocab_size": (int,),
    "eos_id": (int,),
    "shard_tokens": (int,),
    "held_out_fraction": (float, int),
    "drop_copies": (bool,),
}


def claim(out: ObjectStore, recipe: dict[str, Any], source: TokenSource) -> None:
    """Writes both; raises PhalanxError, naming what differs, where somebody else was faster with others."""
    try:
        create_same(out, RECIPE_KEY, canonical_json(recipe))
        create_same(out, INPUT_KEY, source.listing())
    except PhalanxError:
        check_claim(out, recipe, source)
        raise


def check_claim(out: ObjectStore, recipe: dict[str, Any], source: TokenSource) -> None:
    """Raises PhalanxError, naming what differs, where `out` was begun with other settings or another input."""
    found, listing = _read(out, RECIPE_KEY), _read(out, INPUT_KEY)
    if found is not None:
        _check_recipe(out, recipe, found)
    if listing is not None and listing != source.listing():
        raise PhalanxError(
            out.url,
            expected="an empty folder or one begun with the same input",
            remedy=f"the input has changed since: {_difference(listing, source)}; name another --out folder",
        )


def import_recipe(out: ObjectStore) -> dict[str, Any] | None:
    """The recipe of the import that was begun in `out`; None where none was, or a preparation of text."""
    try:
        found = json.loads(_read(out, RECIPE_KEY) or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("format") == RECIPE_FORMAT else None


def claimed_pieces(out: ObjectStore, recipe: dict[str, Any]) -> tuple[Piece, ...]:
    """The pieces that the import in `out` was begun with. recipe: its own. Raises PhalanxError where either is damaged,
    or the listing is not there.
    """
    if not all(type(recipe.get(key)) in kinds for key, kinds in _ASSEMBLED.items()):
        raise damaged_claim(out, RECIPE_KEY)
    try:
        pieces = pieces_of(out.read(INPUT_KEY))
        if not pieces or not all(isinstance(piece.path, str) and type(piece.num_bytes) is int for piece in pieces):
            raise ValueError("a piece without a file")
    except ObjectMissing as error:
        raise PhalanxError(
            f"{out.url}/{INPUT_KEY}",
            expected="the listing of the input",
            remedy="it is missing: run one part again with the same input and settings, which writes it",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged_claim(out, INPUT_KEY) from error
    return pieces


def _check_recipe(out: ObjectStore, recipe: dict[str, Any], data: bytes) -> None:
    try:
        found = dict(json.loads(data))
    except (ValueError, TypeError):
        found = {}
    require_same_recipe(out, found, recipe)


def _difference(listing: bytes, source: TokenSource) -> str:
    """The first file that is another."""
    try:
        there = _files(pieces_of(listing))
    except (ValueError, TypeError, KeyError):
        return "input.json is none of an import"
    here = _files(source.pieces)
    for path in [*there, *here]:
        if path not in here:
            return f"{path!r} is not there any more"
        if path not in there:
            return f"{path!r} was not there"
        if there[path] != here[path]:
            return f"{path!r} is another"
    return "its order is another"


def _files(pieces: tuple[Piece, ...]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.path, []).append(piece)
    return found


def _read(out: ObjectStore, key: str) -> bytes | None:
    try:
        return out.read(key)
    except ObjectMissing:
        return None
