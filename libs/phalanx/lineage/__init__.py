"""A job's attempts, live chain, journal, step records and checkpoint roots as create-only objects
(docs/formats/lineage.md).

The core is pure: `chain` and `journal` decide what is live from plain values. `Lineage` (`store`) keeps the values in
object storage.
"""

from phalanx.lineage.chain import Link, live_chain, live_checkpoints
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.job import position_after
from phalanx.lineage.journal import journal_digest, live_journal
from phalanx.lineage.records import StepRows, WindowRows
from phalanx.lineage.store import Lineage
from phalanx.lineage.values import (
    Attempt,
    CheckpointRef,
    ForkedMixture,
    ForkPoint,
    JobRecord,
    JournalEntry,
    LoaderState,
    Manifest,
    ObjectRef,
    RecordsName,
)

__all__ = [
    "Attempt",
    "CheckpointRef",
    "DamagedObject",
    "ForkPoint",
    "ForkedMixture",
    "JobRecord",
    "JournalEntry",
    "Lineage",
    "Link",
    "LoaderState",
    "Manifest",
    "ObjectRef",
    "RecordsName",
    "StepRows",
    "WindowRows",
    "journal_digest",
    "live_chain",
    "live_checkpoints",
    "live_journal",
    "position_after",
]
