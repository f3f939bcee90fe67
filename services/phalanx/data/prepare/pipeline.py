"""`prepare`: one pass to train the tokenizer, one to write shards, then the manifests; documents stream through, one
shard in memory.

Into `out`: `recipe.json` (the settings, written first), `tokenizer.json`, `train/...`, `held_out/...`; manifests last.
All objects are create-only, so a run that was killed is simply started again. Memory: one shard a split, one batch of
documents, 100 bytes a document to find copies.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.core.digest import canonical_json, sha256
from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import rules
from phalanx.data.prepare.report import PrepareReport
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import Source
from phalanx.data.prepare.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    read_tokenizer_file,
    train_tokenizer,
    training_sample,
)
from phalanx.data.prepare.writer import Document, SplitWriter, create_same
from phalanx.objects import ObjectMissing, ObjectStore

RECIPE_KEY = "recipe.json"
RECIPE_FORMAT = "phalanx.recipe/1"
TOKENIZER_KEY = "tokenizer.json"
TRAIN = "train"
HELD_OUT = "held_out"
_MORE_TEXT = "lower --held-out-fraction or give more documents"


class Phase(enum.Enum):
    """What a preparation is busy with."""

    TOKENIZER = "tokenizer"
    SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is. num_tokens: in shards written; total_bytes: of the whole input, or the cap."""

    phase: Phase
    num_documents: int
    num_bytes: int
    num_tokens: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


def prepare(
    source: Source, out: ObjectStore, settings: PrepareSettings, on_progress: OnProgress | None = None
) -> PrepareReport:
    """Turns `source` into a dataset below `out`; started again after a kill, it continues and ends with the same bytes.

    Raises PhalanxError for settings out of range, a file that is no tokenizer, an input without text to train on, or an
    `out` that holds another dataset; nothing was written then, so the corrected command may go to the same `out`.
    """
    settings.check()
    tell = on_progress or (lambda _: None)
    given = None
    if settings.tokenizer:
        given = read_tokenizer_file(settings.tokenizer)
        load_tokenizer(given, settings.eos_token)
    _check_any_text(source, settings)
    recipe = _recipe(settings, given)
    _claim(out, recipe)
    tokenizer = _tokenizer(source, out, settings, given, tell)
    train = SplitWriter(out.within(TRAIN), TRAIN, tokenizer, settings.shard_tokens)
    held_out = SplitWriter(out.within(HELD_OUT), HELD_OUT, tokenizer, settings.shard_tokens)
    reading = _Reading(source, settings)
    for document in reading.documents():
        writer = held_out if is_held_out(document.content_digest, settings.held_out_fraction) else train
        writer.add(document)
        tell(reading.progress(Phase.SHARDS, train.num_tokens + held_out.num_tokens))
    train.finish()
    held_out.finish()
    if train.is_empty:
        raise _no_text(source, reading.counts, _MORE_TEXT)
    reading.counts[rules.LONG] = train.num_long_documents + held_out.num_long_documents
    lineage = {**recipe, "input_digest": reading.input_digest(), "documents_read": reading.num_documents}
    lineage |= {"bytes_read": reading.num_bytes, "counts": dict(reading.counts)}
    held_out_summary = None if held_out.is_empty else held_out.write_manifest(is_held_out=True, recipe=lineage)
    return PrepareReport(
        url=out.url,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        documents_read=reading.num_documents,
        bytes_read=reading.num_bytes,
        counts=dict(reading.counts),
        train=train.write_manifest(is_held_out=False, recipe=lineage),
        held_out=held_out_summary,
    )


def is_held_out(content_digest: bytes, fraction: float) -> bool:
    """Whether a document goes to the held-out split: its content's hash, as a number from 0 to 1, lies below
    `fraction`.
    """
    return int.from_bytes(content_digest[:8], "big") < fraction * 2.0**64


class _Reading:
    """One pass over the source: cap, text rules and copies applied, everything counted."""

    def __init__(self, source: Source, settings: PrepareSettings) -> None:
        self._source, self._max_bytes = source, settings.max_bytes
        self._seen: set[bytes] = set()
        self._input = hashlib.sha256()
        self.counts: Counter[str] = Counter(dict.fromkeys((*rules.DROPPED, *rules.MENDED, rules.LONG), 0))
        self.num_documents = 0
        self.num_bytes = 0

    def documents(self) -> Iterator[Document]:
        """Documents kept, in order."""
        for raw in self._source.documents():
            if self._max_bytes is not None and self.num_bytes + raw.num_bytes > self._max_bytes:
                return
            self.num_documents += 1
            self.num_bytes += raw.num_bytes
            text = rules.clean(raw, self.counts)
            if text is None:
                continue
            digest = hashlib.sha256(text).digest()
            if digest[:16] in self._seen:
                self.counts[rules.DUPLICATE] += 1
                continue
            self._seen.add(digest[:16])
            self._input.update(digest)
            yield Document(rules.clean_id(raw.id, self.counts), text, digest)

    def input_digest(self) -> str:
        """SHA-256 over the content digests of the documents kept, in order."""
        return f"sha256:{self._input.hexdigest()}"

    def progress(self, phase: Phase, num_tokens: int) -> Progress:
        """How far this pass is."""
        total = self._source.num_bytes if self._max_bytes is None else min(self._max_bytes, self._source.num_bytes)
        return Progress(phase, self.num_documents, self.num_bytes, num_tokens, total)


def _check_any_text(source: Source, settings: PrepareSettings) -> None:
    """Raises PhalanxError, before anything is written, where no document would be kept for training."""
    reading, any_kept = _Reading(source, settings), False
    for document in reading.documents():
        if not is_held_out(document.content_digest, settings.held_out_fraction):
            return
        any_kept = True
    raise _no_text(source, reading.counts, _MORE_TEXT if any_kept else "check the path, or raise --max-bytes")


def _no_text(source: Source, counts: Counter[str], remedy: str) -> PhalanxError:
    dropped = ", ".join(f"{counts[name]} {name}" for name in rules.DROPPED if counts[name])
    found = f" (dropped: {dropped})" if dropped else ""
    return PhalanxError(str(source.root), expected=f"at least one document with text to train on{found}", remedy=remedy)


def _recipe(settings: PrepareSettings, given_tokenizer: bytes | None) -> dict[str, Any]:
    """The settings that decide the bytes of a dataset."""
    return {
        "format": RECIPE_FORMAT,
        "vocab_size": None if given_tokenizer is not None else settings.vocab_size,
        "tokenizer_digest": None if given_tokenizer is None else sha256(given_tokenizer),
        "eos_token": settings.eos_token,
        "held_out_fraction": settings.held_out_fraction,
        "max_bytes": settings.max_bytes,
        "shard_tokens": settings.shard_tokens,
    }


def _claim(out: ObjectStore, recipe: dict[str, Any]) -> None:
    """Writes the recipe first of all; raises PhalanxError, naming what differs, where `out` was begun with other
    settings.
    """
    try:
        found = json.loads(out.read(RECIPE_KEY))
    except ObjectMissing:
        create_same(out, RECIPE_KEY, canonical_json(recipe))
        return
    except ValueError:
        found = {}
    changed = [
        f"{key} {found.get(key)!r} there, {value!r} here" for key, value in recipe.items() if found.get(key) != value
    ]
    if changed:
        raise PhalanxError(
            out.url,
            expected="an empty folder or one begun with the same settings",
            remedy=f"it differs in {'; '.join(changed)}: name another --out folder or the same settings",
        )


def _tokenizer(
    source: Source, out: ObjectStore, settings: PrepareSettings, given: bytes | None, tell: OnProgress
) -> TextTokenizer:
    """The given tokenizer, or one trained on the documents of the training split; stored in `out`."""
    if given is None:
        given = train_tokenizer(
            training_sample(_training_texts(source, settings, tell)), settings.vocab_size, settings.eos_token
        )
    tokenizer = load_tokenizer(given, settings.eos_token)
    create_same(out, TOKENIZER_KEY, given)
    return tokenizer


def _training_texts(source: Source, settings: PrepareSettings, tell: OnProgress) -> Iterator[bytes]:
    reading = _Reading(source, settings)
    for document in reading.documents():
        if not is_held_out(document.content_digest, settings.held_out_fraction):
            tell(reading.progress(Phase.TOKENIZER, 0))
            yield document.text
