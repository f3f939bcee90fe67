"""What datasets and splits lie below a URL, from their manifests alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import MANIFEST_KEY, Split, open_split


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


def find_splits(store: ObjectStore) -> Iterator[FoundSplit]:
    """Every split at or below `store`, by path; raises PhalanxError for a manifest that is broken.

    Folder by folder, and never into a split's own: it may hold millions of objects.
    """
    return _splits_below(store, "")


def _splits_below(store: ObjectStore, folder: str) -> Iterator[FoundSplit]:
    here = store.within(folder) if folder else store
    try:
        store.info(f"{folder}/{MANIFEST_KEY}" if folder else MANIFEST_KEY)
    except ObjectMissing:
        for key in store.children(f"{folder}/" if folder else ""):
            if key.endswith("/"):
                yield from _splits_below(store, key.rstrip("/"))
        return
    yield FoundSplit(folder, here, open_split(here))


def splits_at(store: ObjectStore) -> tuple[FoundSplit, ...]:
    """As `find_splits`, but at least one: raises PhalanxError where there is none."""
    found = tuple(find_splits(store))
    if not found:
        raise PhalanxError(
            store.url,
            expected=f"a dataset (a folder with {MANIFEST_KEY}, or one above it)",
            remedy="check the URL, or make a dataset with `phalanx data prepare INPUT --out URL`",
        )
    return found
