"""`import`: tokens that are there already to a dataset, in the steps of `prepare`, which any start continues.

1. Claim: `recipe.json` (settings), `input.json` (the pieces) and, where it was given, `tokenizer.json` in `out`.
2. Chunks: each piece becomes chunks below `chunks/`, on threads (reading, hashing and writing leave the interpreter).
3. Assemble: the chunks in order become the split, its manifest last; then the chunks are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.claim import check_claim, claim, claimed_pieces
from phalanx.data.importing.errors import BadTokens
from phalanx.data.importing.files import Files, searched
from phalanx.data.importing.making import ChunkMaker
from phalanx.data.importing.settings import ImportSettings, recipe_of
from phalanx.data.importing.source import Piece, TokenSource, token_source
from phalanx.data.prepare.assemble import Cuts, assemble, delete_chunks
from phalanx.data.prepare.chunk import find_chunks
from phalanx.data.prepare.claim import missing_tokenizer
from phalanx.data.prepare.inputs.ahead import ahead
from phalanx.data.prepare.inputs.apart import require_apart
from phalanx.data.prepare.making import TOKENIZER_KEY
from phalanx.data.prepare.parts import Part
from phalanx.data.prepare.progress import Figures, OnProgress, Phase, Progress
from phalanx.data.prepare.report import PartReport, PrepareReport, finished_report
from phalanx.data.prepare.same import create_same
from phalanx.data.prepare.tokenizer import TokenizerFacts
from phalanx.objects import ObjectMissing, ObjectStore

_SHOWN = 5


def import_tokens(
    inputs: Sequence[str],
    out: ObjectStore,
    settings: ImportSettings,
    on_progress: OnProgress | None = None,
    workers: int = 1,
) -> PrepareReport:
    """Writes the tokens of `inputs` to a dataset below `out`; started again after a kill, it continues and ends with
    the same bytes; of a finished dataset it gives the report at once.

    workers: threads that make chunks. Raises PhalanxError for settings out of range, an input that is cut, contradicts
    itself or holds ids outside the vocabulary, or an `out` that holds another dataset. What sizes, indices, headers and
    the first ids show is refused before anything is written; an id found later leaves chunks, but no split.
    """
    tell = on_progress or _quiet
    begun = _begin(inputs, out, settings)
    if begun.finished is None:
        _make(begun, out, range(len(begun.source.pieces)), tell, workers)
        return _assemble(out, begun.recipe, begun.source.pieces, tell)
    return begun.finished


def import_part(
    inputs: Sequence[str],
    out: ObjectStore,
    settings: ImportSettings,
    part: Part,
    on_progress: OnProgress | None = None,
    workers: int = 1,
) -> PartReport:
    """Makes the chunks of one part's pieces; `merge` assembles them once all parts are done. See `import_tokens`."""
    begun = _begin(inputs, out, settings)
    num_pieces = len(begun.source.pieces)
    numbers = part.numbers(num_pieces)
    made, done = 0, Figures()
    if begun.finished is None:
        made, done = _make(begun, out, numbers, on_progress or _quiet, workers)
    return PartReport(
        url=out.url,
        part=part.number,
        parts=part.count,
        pieces=num_pieces,
        pieces_of_part=len(numbers),
        pieces_made=made,
        documents_read=done.num_records,
        bytes_read=done.num_bytes,
        num_tokens=done.num_tokens,
        is_finished=begun.finished is not None,
    )


def merge(out: ObjectStore, recipe: dict[str, Any], on_progress: OnProgress | None = None) -> PrepareReport:
    """Assembles what the parts made. recipe: that of `out`. Raises PhalanxError, naming the pieces, where chunks are
    missing.
    """
    finished = finished_report(out)
    if finished is not None:
        delete_chunks(out)
        return finished
    pieces = claimed_pieces(out, recipe)
    try:
        if recipe.get("has_tokenizer"):
            out.info(TOKENIZER_KEY)
    except ObjectMissing as error:
        raise missing_tokenizer(out) from error
    return _assemble(out, recipe, pieces, on_progress or _quiet)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An import whose claim is written. finished: the report, where nothing is left to do."""

    source: TokenSource
    files: Files
    facts: TokenizerFacts
    recipe: dict[str, Any]
    finished: PrepareReport | None = None

    def maker(self, out: ObjectStore) -> ChunkMaker:
        return ChunkMaker(self.source, self.files, out, self.facts.vocab_size, self.facts.eos_id)


def _begin(inputs: Sequence[str], out: ObjectStore, settings: ImportSettings) -> _Begun:
    """Checks all that can be checked without reading everything, then claims `out`."""
    settings.check()
    require_apart(out, searched(inputs))
    facts, tokenizer = settings.vocabulary()
    source, files = token_source(inputs, settings.how)
    recipe = recipe_of(settings, source, facts, has_tokenizer=tokenizer is not None)
    check_claim(out, recipe, source)
    finished = finished_report(out)
    if finished is not None:
        delete_chunks(out)
        return _Begun(source, files, facts, recipe, finished)
    _check_first_ids(source, files, facts.vocab_size)
    claim(out, recipe, source)
    if tokenizer is not None:
        create_same(out, TOKENIZER_KEY, tokenizer)
    return _Begun(source, files, facts, recipe)


def _check_first_ids(source: TokenSource, files: Files, vocab_size: int) -> None:
    """Raises BadTokens where the first ids are none of the vocabulary, or there is no id at all."""
    numbers = range(len(source.pieces))
    if not any(len(rows.tokens) for number in numbers for rows in source.rows(files, number, vocab_size)):
        raise BadTokens(files.shown(source.pieces[0].path), expected="tokens", remedy="it is empty: name another input")


def _make(
    begun: _Begun, out: ObjectStore, numbers: Iterable[int], tell: OnProgress, workers: int
) -> tuple[int, Figures]:
    """Makes the chunks that are missing of these pieces; how many pieces, and what they gave."""
    found, maker, pieces = find_chunks(out), begun.maker(out), begun.source.pieces
    missing = [number for number in numbers if number not in found.finished]
    done, num_bytes = Figures(), sum(pieces[number].num_bytes for number in found.finished)
    total = begun.source.num_bytes
    tell(Progress(Phase.CHUNKS, 0, num_bytes, 0, total))
    made = ahead(lambda number: maker.make(number, found.parts.get(number, ())), missing, workers)
    with closing(made):
        for number, figures in zip(missing, made, strict=True):
            done += figures
            num_bytes += pieces[number].num_bytes
            tell(Progress(Phase.CHUNKS, done.num_records, num_bytes, done.num_tokens, total))
    return len(missing), done


def _assemble(out: ObjectStore, recipe: dict[str, Any], pieces: Sequence[Piece], tell: OnProgress) -> PrepareReport:
    """Assembles the chunks of all pieces; raises PhalanxError where some are missing."""
    found = find_chunks(out).finished
    missing = [number for number in range(len(pieces)) if number not in found]
    if missing:
        shown = ", ".join(f"{number + 1} ({pieces[number].path})" for number in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise PhalanxError(
            out.url,
            expected=f"the chunks of all {len(pieces)} pieces; {len(missing)} are missing: piece {shown}{more}",
            remedy="run the parts that make them (piece P is of part (P - 1) mod N + 1 of N), or import without --part",
        )
    num_bytes = sum(piece.num_bytes for piece in pieces)

    def show(done: int, total: int) -> None:
        tell(Progress(Phase.SHARDS, 0, num_bytes * done // total, 0, num_bytes))

    facts = TokenizerFacts(recipe["tokenizer_digest"], recipe["vocab_size"], recipe["eos_id"])
    cuts = Cuts(recipe["shard_tokens"], recipe["held_out_fraction"], drop_copies=recipe["drop_copies"])
    return assemble(out, [found[number] for number in range(len(pieces))], cuts, facts, recipe, show)


def _quiet(progress: Progress) -> None:
    """Tells nobody."""
