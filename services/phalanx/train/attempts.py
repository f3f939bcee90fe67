"""Opens an attempt in storage: what fences every older one off, with the journal entries that the start asks for."""

from __future__ import annotations

from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, Lineage
from phalanx.lineage.plan import damaged_checkpoints
from phalanx.lineage.rollback import leave_out
from phalanx.objects import ObjectStore
from phalanx.train.decide import Opened
from phalanx.train.states import Preparation, Start


def open_attempt(store: ObjectStore, start: Start, preparation: Preparation, windows: int) -> Opened:
    """The attempt that the start decided on; opened once, however often and by however many processes this is called.

    windows: of a step. Raises PhalanxError where the checkpoint is another job's, what the store raises, and
    DamagedObject for damage that no older checkpoint mends.
    """
    lineage = Lineage(store)
    attempt = _opened(lineage, start, preparation)
    if start.skips:
        wanted = [lineage.windows_of(first, last, windows) for first, last in start.skips]
        leave_out(lineage, attempt.number, wanted, start.request_id)
    return Opened(attempt.number, attempt.parent)


def _opened(lineage: Lineage, start: Start, preparation: Preparation) -> Attempt:
    nodes = {node_id: list(ranks) for node_id, ranks in start.ranks.items()}
    avoid = set(damaged_checkpoints(lineage)) | _too_new(lineage, start.avoid_from)
    while True:
        try:
            return lineage.open_attempt(
                code_digest=preparation.code_digest,
                identity_digest=preparation.identity_digest,
                placement={**preparation.placement, "nodes": nodes},
                avoid=avoid,
                request_id=start.request_id,
            )
        except DamagedObject as error:
            if error.checkpoint is None or error.checkpoint in avoid:
                raise
            avoid.add(error.checkpoint)


def _too_new(lineage: Lineage, first_step: int) -> set[CheckpointRef]:
    """Checkpoints that the windows to be left out went into."""
    return {ref for ref in lineage.checkpoints() if first_step and ref.step >= first_step}
