"""What a dataset in the making was begun with: its settings in `recipe.json`, the listing of its input in `input.json`.

Both are written before anything else, so that nobody goes on with other settings or another input in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from phalanx.core.digest import canonical_json, sha256
from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.inputs import Fields, Piece, Span
from phalanx.data.prepare.inputs.documents import DEFAULT_FIELDS
from phalanx.data.prepare.same import create_same
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.objects import ObjectMissing, ObjectStore

RECIPE_KEY = "recipe.json"
RECIPE_FORMAT = "phalanx.recipe/1"
INPUT_KEY = "input.json"
INPUT_FORMAT = "phalanx.input/1"


def recipe_of(settings: PrepareSettings, fields: Fields, given_tokenizer: bytes | None) -> dict[str, Any]:
    """The settings that decide the bytes of a dataset."""
    return {
        "format": RECIPE_FORMAT,
        "vocab_size": None if given_tokenizer is not None else settings.vocab_size,
        "tokenizer_digest": None if given_tokenizer is None else sha256(given_tokenizer),
        "eos_token": settings.eos_token,
        "held_out_fraction": settings.held_out_fraction,
        "max_bytes": settings.max_bytes,
        "shard_tokens": settings.shard_tokens,
        "text_field": fields.text,
        "id_field": fields.id,
        "min_chars": settings.lengths.min_chars,
        "max_chars": settings.lengths.max_chars,
    }


def require_same_recipe(out: ObjectStore, found: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Raises PhalanxError, naming what differs, where `out` was begun with the recipe `found` instead."""
    changed = [
        f"{key} {found.get(key)!r} there, {value!r} here" for key, value in recipe.items() if found.get(key) != value
    ]
    if changed:
        raise PhalanxError(
            out.url,
            expected="an empty folder or one begun with the same settings",
            remedy=f"it differs in {'; '.join(changed)}: name another --out folder or the same settings",
        )


def check_claim(out: ObjectStore, recipe: dict[str, Any], pieces: Sequence[Piece], *, may_change: bool = False) -> bool:
    """Whether `out` was begun with this very input, or with none. may_change: another input is no mistake.

    Raises PhalanxError, naming what differs, where `out` was begun with other settings or another input.
    """
    found = _read_json(out, RECIPE_KEY)
    if found is None:
        return True
    require_same_recipe(out, found, recipe)
    listing = _read_json(out, INPUT_KEY)
    if listing is not None and listing != json.loads(_listing(pieces)):
        _pieces_of(out, listing)
        if may_change:
            return False
        raise PhalanxError(
            out.url,
            expected="an empty folder or one begun with the same input",
            remedy=f"the input has changed since: {_difference(listing, pieces)}; name another --out folder",
        )
    return True


def claim(out: ObjectStore, recipe: dict[str, Any], pieces: Sequence[Piece]) -> None:
    """Writes both objects; raises PhalanxError, naming what differs, where somebody else was faster with others."""
    try:
        create_same(out, RECIPE_KEY, canonical_json(recipe))
        create_same(out, INPUT_KEY, _listing(pieces))
    except PhalanxError:
        check_claim(out, recipe, pieces)
        raise


def read_claim(out: ObjectStore) -> tuple[dict[str, Any], tuple[Piece, ...]]:
    """The recipe and the pieces that `out` was begun with.

    Raises PhalanxError where nothing was begun, or one of them is damaged.
    """
    recipe, listing = _read_json(out, RECIPE_KEY), _read_json(out, INPUT_KEY)
    if recipe is None or listing is None:
        raise PhalanxError(
            out.url,
            expected="a dataset begun by `phalanx data prepare`",
            remedy="run its parts first: phalanx data prepare INPUT --out URL --part I/N",
        )
    if not _is_recipe(recipe):
        raise damaged_claim(out, RECIPE_KEY)
    return recipe, _pieces_of(out, listing)


def damaged_claim(out: ObjectStore, key: str) -> PhalanxError:
    """The error for a recipe or a listing that is none."""
    return PhalanxError(
        f"{out.url}/{key}",
        expected="what the first start wrote there, it is damaged",
        remedy="delete it and run one part again with the same input and settings, which writes it anew",
    )


def missing_tokenizer(out: ObjectStore) -> PhalanxError:
    """The error for a dataset in the making whose tokenizer.json is gone."""
    return PhalanxError(
        f"{out.url}/tokenizer.json",
        expected="the tokenizer of the dataset",
        remedy="it is missing: run one part again with the same input and settings, which writes it anew",
    )


def _is_recipe(found: dict[str, Any]) -> bool:
    """Whether all is there, and what assembling needs of the right type."""
    return (
        found.get("format") == RECIPE_FORMAT
        and found.keys() >= recipe_of(PrepareSettings(), DEFAULT_FIELDS, None).keys()
        and isinstance(found["eos_token"], str)
        and type(found["shard_tokens"]) is int
        and isinstance(found["held_out_fraction"], float | int)
        and isinstance(found["max_bytes"], int | None)
    )


def _pieces_of(out: ObjectStore, listing: dict[str, Any]) -> tuple[Piece, ...]:
    """The pieces of `input.json`; raises PhalanxError where it is damaged."""
    try:
        pieces = tuple(Piece(tuple(Span(*span) for span in spans)) for spans in listing["pieces"])
        if not pieces or not all(piece.spans and all(map(_is_span, piece.spans)) for piece in pieces):
            raise ValueError("a piece without a file")
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_claim(out, INPUT_KEY) from error
    return pieces


def _is_span(span: Span) -> bool:
    return isinstance(span.path, str) and all(type(each) is int for each in (span.num_bytes, span.start, span.stop))


def _listing(pieces: Sequence[Piece]) -> bytes:
    """The bytes of `input.json`: ASCII, for paths that are no Unicode."""
    spans = [[[span.path, span.num_bytes, span.start, span.stop] for span in piece.spans] for piece in pieces]
    return json.dumps({"format": INPUT_FORMAT, "pieces": spans}, sort_keys=True, separators=(",", ":")).encode()


def _difference(listing: dict[str, Any], pieces: Sequence[Piece]) -> str:
    """The first file that is another."""
    there = _files(span[:2] for spans in listing.get("pieces", ()) for span in spans)
    here = _files([span.path, span.num_bytes] for piece in pieces for span in piece.spans)
    for old, new in zip_longest(there.items(), here.items()):
        if old == new:
            continue
        if old is None or (new is not None and new[0] not in there):
            return f"{new[0]!r} was not there"
        if new is None or old[0] not in here:
            return f"{old[0]!r} is not there any more"
        if old[0] == new[0]:
            return f"{old[0]!r} had {old[1]} bytes and has {new[1]}"
        break
    return "it is cut into other pieces"


def _files(spans: Any) -> dict[str, int]:
    return {path: num_bytes for path, num_bytes in spans}  # noqa: C416 - a file cut into ranges counts once


def _read_json(out: ObjectStore, key: str) -> dict[str, Any] | None:
    """An object as JSON; None where it is missing, {} where it is none."""
    try:
        found = json.loads(out.read(key))
    except ObjectMissing:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
