"""Small corpora and a store that dies, for the preparation's tests."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.prepare import PrepareSettings
from phalanx.objects.base import ScopedStore

WORDS = [
    "the",
    "line",
    "holds",
    "when",
    "one",
    "falls",
    "the",
    "next",
    "steps",
    "forward",
    "and",
    "all",
    "move",
    "as",
    "one",
]
SETTINGS = PrepareSettings(vocab_size=300, held_out_fraction=0.2, shard_tokens=600)


def write_corpus(folder: Path, num_documents: int = 60) -> Path:
    """A folder tree of texts, all different, of uneven length."""
    for number in range(num_documents):
        file = folder / f"part{number % 3}" / f"v1.{number}_doc.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        words = [WORDS[(number * 7 + k * (number + 1)) % len(WORDS)] for k in range(5 + number * 13 % 90)]
        file.write_text(f"{number} " + " ".join(words))
    return folder


class Killed(BaseException):
    """Stands for the end of the process."""


class DyingStore(ScopedStore):
    """A store below a prefix after whose n-th create the process dies: the object is there, the reply never comes."""

    def __init__(self, store, prefix, creates_left):
        super().__init__(store, prefix)
        self._left = creates_left

    def create(self, key, data):
        super().create(key, data)
        self._count()

    def _count(self):
        self._left[0] -= 1
        if not self._left[0]:
            raise Killed

    def within(self, prefix):
        return DyingStore(self._store, self._prefix + prefix, self._left)
