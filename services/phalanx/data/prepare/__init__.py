"""Text -> shards: inputs, text rules, tokenizer, chunks by any number of workers, shards of both splits, manifests;
deterministic and continuable.
"""

from phalanx.data.prepare.engines import Engine, Local, engine
from phalanx.data.prepare.parts import Part
from phalanx.data.prepare.pipeline import merge, prepare, prepare_part
from phalanx.data.prepare.progress import Phase, Progress
from phalanx.data.prepare.report import PartReport, PrepareReport
from phalanx.data.prepare.rules import Lengths
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import TEXT_SUFFIXES, Fields, RawDocument, Source, python_stdlib_corpus, source_of

__all__ = [
    "TEXT_SUFFIXES",
    "Engine",
    "Fields",
    "Lengths",
    "Local",
    "Part",
    "PartReport",
    "Phase",
    "PrepareReport",
    "PrepareSettings",
    "Progress",
    "RawDocument",
    "Source",
    "engine",
    "merge",
    "prepare",
    "prepare_part",
    "python_stdlib_corpus",
    "source_of",
]
