"""What a preparation did: documents kept and dropped by rule, and the two splits that came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """One split that was written; digest: the dataset digest."""

    name: str
    digest: str
    num_shards: int
    num_documents: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """counts: documents dropped or mended, by the names in `rules`. held_out is None where no document fell into it."""

    url: str
    tokenizer_digest: str
    vocab_size: int
    documents_read: int
    bytes_read: int
    counts: Mapping[str, int]
    train: SplitSummary
    held_out: SplitSummary | None
