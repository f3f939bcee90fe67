"""How far a preparation is."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Phase(enum.Enum):
    """What a preparation is busy with: training the tokenizer, making chunks of the input, assembling shards."""

    TOKENIZER = "tokenizer"
    CHUNKS = "chunks"
    SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is. num_bytes of total_bytes: of the input as listed, or the cap, what earlier starts finished
    included. num_documents (records read), num_tokens: of this start alone.
    """

    phase: Phase
    num_documents: int
    num_bytes: int
    num_tokens: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a piece gave so far. num_bytes: of its records as found, dropped ones included."""

    num_records: int = 0
    num_bytes: int = 0
    num_tokens: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.num_records + other.num_records, self.num_bytes + other.num_bytes, self.num_tokens + other.num_tokens
        )
