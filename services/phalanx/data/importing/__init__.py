"""Tokens that people have already -> shards, untouched, their order and boundaries kept: from MDS, Megatron, Hugging
Face datasets, .npy and raw files.
"""

from phalanx.data.importing.claim import import_recipe
from phalanx.data.importing.options import Boundaries, Format, Understanding
from phalanx.data.importing.pipeline import import_part, import_tokens, merge
from phalanx.data.importing.settings import ImportSettings

__all__ = [
    "Boundaries",
    "Format",
    "ImportSettings",
    "Understanding",
    "import_part",
    "import_recipe",
    "import_tokens",
    "merge",
]
