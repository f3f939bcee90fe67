"""`prepare`: text to a dataset, in three steps that any start continues.

1. Claim: `recipe.json` (settings), `input.json` (the listing, cut into pieces) and `tokenizer.json` in `out`.
2. Chunks: each piece becomes chunks below `chunks/`, by any worker in any order (`making`, `engines`): the heavy part.
3. Assemble: the chunks in order become `train/...` and `held_out/...`, manifests last; then the chunks are deleted.

All objects are create-only and their bytes follow from input and settings, so a run that was killed is simply started
again, and the dataset does not depend on engine, workers or parts. Where the input was refused and is mended, what was
made of it is deleted first (`refused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.assemble import Cuts, assemble, delete_chunks
from phalanx.data.prepare.board import Board
from phalanx.data.prepare.chunk import FoundChunks, find_chunks, read_arrays
from phalanx.data.prepare.claim import INPUT_KEY, check_claim, claim, missing_tokenizer, read_claim, recipe_of
from phalanx.data.prepare.engines import Engine, Local
from phalanx.data.prepare.inputs import Piece
from phalanx.data.prepare.inputs.apart import require_apart
from phalanx.data.prepare.making import TOKENIZER_KEY, Task, WorkOrder, piece_names
from phalanx.data.prepare.parts import Part, missing_pieces
from phalanx.data.prepare.progress import OnProgress, Phase, Progress
from phalanx.data.prepare.reading import OrderedReading, check_any_text
from phalanx.data.prepare.refused import Refused, note_refused, refused_pieces, touched_by
from phalanx.data.prepare.report import HELD_OUT, TRAIN, PartReport, PrepareReport, finished_report
from phalanx.data.prepare.same import create_same
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import Source
from phalanx.data.prepare.tokenizer import load_tokenizer, read_tokenizer_file, training_sample
from phalanx.data.prepare.training import train_apart
from phalanx.objects import ObjectMissing, ObjectStore

_WHOLE = Part(1, 1)


def prepare(
    source: Source,
    out: ObjectStore,
    settings: PrepareSettings,
    on_progress: OnProgress | None = None,
    engine: Engine | None = None,
) -> PrepareReport:
    """Turns `source` into a dataset below `out`; started again after a kill, it continues and ends with the same bytes;
    of a finished dataset it gives the report at once.

    engine: who makes the chunks (None: this process). One with other processes opens `out` there by its URL alone.
    Raises PhalanxError for settings out of range, a file that is no tokenizer, an input without text to train on, or an
    `out` that holds another dataset; nothing was written then, so the corrected command may go to the same `out`.
    Raises OutsideError where workers die.
    """
    tell = on_progress or _quiet
    begun = _begin(source, out, settings, tell)
    if begun.finished is not None:
        return begun.finished
    _make(begun, out, begun.find_chunks(out), range(len(begun.pieces)), tell, engine)
    return _assemble(out, begun.recipe, begun.pieces, tell)


def prepare_part(
    source: Source,
    out: ObjectStore,
    settings: PrepareSettings,
    part: Part,
    on_progress: OnProgress | None = None,
    engine: Engine | None = None,
) -> PartReport:
    """Makes the chunks of one part's pieces; `merge` assembles them once all parts are done. See `prepare`."""
    tell = on_progress or _quiet
    begun = _begin(source, out, settings, tell, part)
    numbers = part.numbers(len(begun.pieces))
    if begun.finished is not None:
        return PartReport(out.url, part.number, part.count, len(begun.pieces), len(numbers), 0, 0, 0, 0, True)
    board = _make(begun, out, begun.find_chunks(out), numbers, tell, engine)
    made = board.figures
    return PartReport(
        out.url,
        part.number,
        part.count,
        len(begun.pieces),
        len(numbers),
        board.num_made,
        made.num_records,
        made.num_bytes,
        made.num_tokens,
    )


def merge(out: ObjectStore, on_progress: OnProgress | None = None) -> PrepareReport:
    """Assembles what the parts made. Raises PhalanxError, naming the pieces, where chunks are missing."""
    recipe, pieces = read_claim(out)
    finished = finished_report(out)
    if finished is not None:
        delete_chunks(out)
        return finished
    return _assemble(out, recipe, pieces, on_progress or _quiet)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A preparation whose claim is written. finished: the report, where nothing is left to do."""

    order: WorkOrder
    pieces: Sequence[Piece]
    recipe: dict[str, Any]
    tokenizer_digest: str = ""
    finished: PrepareReport | None = None

    def find_chunks(self, out: ObjectStore) -> FoundChunks:
        """The chunks of these pieces that are there."""
        return find_chunks(out, piece_names(enumerate(self.pieces), self.tokenizer_digest))


def _begin(
    source: Source, out: ObjectStore, settings: PrepareSettings, tell: OnProgress, part: Part = _WHOLE
) -> _Begun:
    """Checks all that can be checked, then claims `out` and stores the tokenizer."""
    settings.check()
    require_apart(out, source.searched)
    given = None
    if settings.tokenizer:
        given = read_tokenizer_file(settings.tokenizer)
        load_tokenizer(given, settings.eos_token)
    pieces = source.pieces()
    recipe = recipe_of(settings, source.fields, given)
    order = WorkOrder(out.url, source.without_listing(), settings.eos_token, settings.max_bytes, settings.lengths)
    finished = finished_report(out)
    refused = refused_pieces(out) if finished is None else []
    is_same = check_claim(out, recipe, pieces, may_change=bool(refused))
    if finished is not None:
        delete_chunks(out)
        return _Begun(order, pieces, recipe, finished=finished)
    check_any_text(source, pieces, settings)
    own = {pieces[number] for number in part.numbers(len(pieces))} if refused else set()
    if not is_same or any(each.piece in own for each in refused):
        _forget(out, refused, pieces, is_same=is_same, is_trained=given is None)
    claim(out, recipe, pieces)
    if given is None:
        given = _trained_tokenizer(source, pieces, out, settings, tell)
    create_same(out, TOKENIZER_KEY, given)
    return _Begun(order, pieces, recipe, sha256(given))


def _forget(
    out: ObjectStore, refused: Sequence[Refused], pieces: Sequence[Piece], *, is_same: bool, is_trained: bool
) -> None:
    """Deletes what was made of files that were refused: they may be mended by now, at the same size even.

    A killed start is done again: the notes go last. Raises PhalanxError where shards of another input are there.
    """
    if not is_same and any(next(iter(out.list(f"{split}/")), None) for split in (TRAIN, HELD_OUT)):
        raise PhalanxError(
            out.url,
            expected="an empty folder or one begun with the same input",
            remedy="the input has changed since shards were written there: name another --out folder",
        )
    try:
        digest = sha256(out.read(TOKENIZER_KEY))
    except ObjectMissing:
        digest = ""
    for key in find_chunks(out, piece_names(enumerate(touched_by(refused, pieces)), digest)).keys:
        out.delete(key)
    if is_trained:
        out.delete(TOKENIZER_KEY)
    if not is_same:
        out.delete(INPUT_KEY)
    for each in refused:
        out.delete(each.key)


def _trained_tokenizer(
    source: Source, pieces: Sequence[Piece], out: ObjectStore, settings: PrepareSettings, tell: OnProgress
) -> bytes:
    """The tokenizer that was trained on the first documents of the training split, by somebody before or here."""
    try:
        return out.read(TOKENIZER_KEY)
    except ObjectMissing:
        pass
    reading = OrderedReading(source, pieces, settings)
    total = source.num_bytes if settings.max_bytes is None else min(settings.max_bytes, source.num_bytes)

    def show(text: bytes) -> bytes:
        tell(Progress(Phase.TOKENIZER, reading.figures.num_records, min(reading.figures.num_bytes, total), 0, total))
        return text

    sample = training_sample(map(show, reading.training_texts()))
    try:
        return train_apart(sample, settings.vocab_size, settings.eos_token)
    except PhalanxError as error:
        if reading.piece is not None:
            note_refused(out, reading.piece, error)
        raise


def _make(
    begun: _Begun, out: ObjectStore, found: FoundChunks, numbers: range, tell: OnProgress, engine: Engine | None
) -> Board:
    """Makes the chunks that are missing of these pieces."""
    order, pieces = begun.order, begun.pieces
    board = Board(pieces, order.max_bytes, _raw_bytes(out, found, order.max_bytes is not None), tell)
    board.show()
    tasks = [
        Task(number, pieces[number], found.parts.get(number, ()))
        for number in numbers
        if number not in found.finished and board.is_needed(number)
    ]
    if tasks:
        (engine or Local()).make(order, out, tasks, board)
    return board


def _raw_bytes(out: ObjectStore, found: FoundChunks, is_capped: bool) -> dict[int, int]:
    """Raw bytes of finished pieces, by number; 0 where no cap asks for them."""
    if not is_capped:
        return dict.fromkeys(found.finished, 0)
    return {
        number: sum(int(read_arrays(out, chunk, ["raw_bytes"])["raw_bytes"].sum()) for chunk in chunks)
        for number, chunks in found.finished.items()
    }


def _assemble(out: ObjectStore, recipe: dict[str, Any], pieces: Sequence[Piece], tell: OnProgress) -> PrepareReport:
    """Assembles the chunks of all pieces that are needed; raises PhalanxError where some are missing.

    Two starts may do it at once: they write the same, and the slower one finds the chunks gone and the dataset there.
    """
    try:
        return _assemble_chunks(out, recipe, pieces, tell)
    except (ObjectMissing, PhalanxError) as error:
        finished = finished_report(out)
        if finished is not None:
            delete_chunks(out)
            return finished
        if isinstance(error, PhalanxError):
            raise
        raise OutsideError(f"{out.url}/{error}: was there a moment ago, and is gone: start again") from error


def _assemble_chunks(
    out: ObjectStore, recipe: dict[str, Any], pieces: Sequence[Piece], tell: OnProgress
) -> PrepareReport:
    try:
        data = out.read(TOKENIZER_KEY)
    except ObjectMissing as error:
        raise missing_tokenizer(out) from error
    found, cap = find_chunks(out, piece_names(enumerate(pieces), sha256(data))), recipe["max_bytes"]
    board = Board(pieces, cap, _raw_bytes(out, found, cap is not None), _quiet)
    needed = [number for number in range(len(pieces)) if board.is_needed(number)]
    missing = [number for number in needed if number not in found.finished]
    if missing:
        raise missing_pieces(out.url, missing, pieces)
    num_bytes = sum(pieces[number].num_bytes for number in needed)

    def show(done: int, total: int) -> None:
        tell(Progress(Phase.SHARDS, 0, num_bytes * done // total, 0, num_bytes))

    tokenizer = load_tokenizer(data, recipe["eos_token"], f"{out.url}/{TOKENIZER_KEY}")
    cuts = Cuts(recipe["shard_tokens"], recipe["held_out_fraction"], cap)
    return assemble(out, [found.finished[number] for number in needed], cuts, tokenizer.facts, recipe, show)


def _quiet(progress: Progress) -> None:
    """Tells nobody."""
