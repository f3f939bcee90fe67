"""Text -> shards: sources, text rules, tokenizer, shards of both splits, manifests; deterministic and continuable."""

from phalanx.data.prepare.pipeline import Phase, Progress, prepare
from phalanx.data.prepare.report import PrepareReport
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import TEXT_SUFFIXES, RawDocument, Source, python_stdlib_corpus, source_of

__all__ = [
    "TEXT_SUFFIXES",
    "Phase",
    "PrepareReport",
    "PrepareSettings",
    "Progress",
    "RawDocument",
    "Source",
    "prepare",
    "python_stdlib_corpus",
    "source_of",
]
