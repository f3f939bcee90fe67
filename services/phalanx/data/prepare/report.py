"""What a preparation did: documents kept and dropped by rule, and the two splits that came out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from phalanx.core.digest import canonical_json
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import MANIFEST_KEY

REPORT_KEY = "report.json"
TRAIN = "train"
HELD_OUT = "held_out"


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
    """counts: documents dropped or mended, by the names in `rules`; examples: ids of the first few of each.

    held_out is None where no document fell into it.
    """

    url: str
    tokenizer_digest: str
    vocab_size: int
    documents_read: int
    bytes_read: int
    counts: Mapping[str, int]
    train: SplitSummary
    held_out: SplitSummary | None
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes of `report.json`: all but the URL, which is where it lies."""
        facts = {name: value for name, value in asdict(self).items() if name != "url"}
        return canonical_json({**facts, "format": "phalanx.report/1"})


def finished_report(out: ObjectStore) -> PrepareReport | None:
    """The report of the dataset in `out`, or None where it is not finished: the manifest of its training split is the
    last object to be created.
    """
    try:
        out.info(f"{TRAIN}/{MANIFEST_KEY}")
        found = json.loads(out.read(REPORT_KEY))
    except ObjectMissing:
        return None
    del found["format"]
    held_out = None if found["held_out"] is None else SplitSummary(**found["held_out"])
    examples = {rule: tuple(ids) for rule, ids in found["examples"].items()}
    parts = {"url": out.url, "train": SplitSummary(**found["train"]), "held_out": held_out, "examples": examples}
    return PrepareReport(**{**found, **parts})


@dataclass(frozen=True, slots=True)
class PartReport:
    """What one part of a preparation did. pieces: of the whole input; pieces_of_part: of this part; pieces_made: by
    this start; is_finished: the dataset was assembled already, so there was nothing to do.
    """

    url: str
    part: int
    parts: int
    pieces: int
    pieces_of_part: int
    pieces_made: int
    documents_read: int
    bytes_read: int
    num_tokens: int
    is_finished: bool = False
