"""What datasets and splits lie below a URL, from their manifests alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.report import HELD_OUT, REPORT_KEY, TRAIN
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import MANIFEST_KEY, Split, has_manifest, index_key, open_split


@dataclass(frozen=True, slots=True)
class FoundSplit:
    """A split below the URL that was asked; path: its folder relative to that URL, empty for the URL itself."""

    path: str
    store: ObjectStore
    split: Split

    def facts(self) -> dict[str, object]:
        """What there is to say about the split, as plain JSON values."""
        split = self.split
        return {
            "path": self.path,
            "url": split.url,
            "name": split.name,
            "digest": split.digest,
            "is_held_out": split.is_held_out,
            "shards": split.num_shards,
            "documents": split.num_documents,
            "tokens": split.num_tokens,
            "bytes": split.num_bytes,
            "token_dtype": split.dtype.name,
            "vocab_size": split.vocab_size,
            "eos_id": split.eos_id,
            "tokenizer_digest": split.tokenizer_digest,
        }


@dataclass(frozen=True, slots=True)
class LostSplit:
    """A folder that has no manifest, though its dataset's report names it, or shards lie in it; path: as in
    `FoundSplit`.
    """

    path: str


def find_splits(store: ObjectStore) -> Iterator[FoundSplit]:
    """Every split at or below `store`, by path; raises PhalanxError for a manifest that is broken.

    Folder by folder, and never into a split's own: it may hold millions of objects.
    """
    return (each for each in _splits_below(store, "") if isinstance(each, FoundSplit))


def splits_at(store: ObjectStore) -> tuple[FoundSplit, ...]:
    """As `find_splits`, but at least one: raises PhalanxError where there is none."""
    found = tuple(find_splits(store))
    if not found:
        raise _no_dataset(store)
    return found


def whole_and_lost_at(store: ObjectStore) -> tuple[tuple[FoundSplit, ...], tuple[LostSplit, ...]]:
    """As `splits_at`, and the splits that ought to be there: raises PhalanxError where there is neither."""
    found = tuple(dict.fromkeys(_splits_below(store, "")))
    if not found:
        raise _no_dataset(store)
    lost = tuple(each for each in found if isinstance(each, LostSplit))
    return tuple(each for each in found if isinstance(each, FoundSplit)), lost


def _splits_below(store: ObjectStore, folder: str) -> Iterator[FoundSplit | LostSplit]:
    here, prefix = (store.within(folder), f"{folder}/") if folder else (store, "")
    if has_manifest(here):
        yield FoundSplit(folder, here, open_split(here))
        return
    has_shards = False
    for key in store.children(prefix):
        if key.endswith("/"):
            yield from _splits_below(store, key.rstrip("/"))
        elif key == prefix + REPORT_KEY:
            named = (name for name in _reported(here) if not has_manifest(here.within(name)))
            yield from (LostSplit(prefix + name) for name in named)
        elif not has_shards and key.endswith(index_key("")):
            has_shards = True
            yield LostSplit(folder)


def _reported(dataset: ObjectStore) -> tuple[str, ...]:
    """The splits that the report of a dataset names; none where it is not one of ours."""
    try:
        report = json.loads(dataset.read(REPORT_KEY))
    except (ObjectMissing, ValueError):
        return ()
    if not isinstance(report, dict) or not str(report.get("format")).startswith("phalanx.report/"):
        return ()
    return tuple(name for name in (TRAIN, HELD_OUT) if report.get(name) is not None)


def _no_dataset(store: ObjectStore) -> PhalanxError:
    return PhalanxError(
        store.url,
        expected=f"a dataset (a folder with {MANIFEST_KEY}, or one above it)",
        remedy="check the URL, or make a dataset with `phalanx data prepare INPUT --out URL`",
    )
