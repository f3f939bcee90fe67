"""`checkpoint.partial` of a fork or a resume: each name is a tensor of the checkpoint, or may be one of the job."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import ObjectStore
from phalanx.snapshot.lookup import Lookup
from phalanx.spec import Job

_NUM_NEAREST, _CUTOFF = 3, 0.3


def require_known(before: Job, after: Job, store: ObjectStore, ref: CheckpointRef) -> None:
    """Raises Problems that name each of `after`'s `checkpoint.partial` that is no tensor of the checkpoint `ref` of the
    job at `store`, whose file is `before`, and can't be one of `after`; DamagedCheckpoint.

    What a model class of the user's own holds nobody knows before it is built: of such a job any name is taken that
    begins as the model's and the optimizer's do. Nothing is read where no name is given.
    """
    names = after.checkpoint.partial_names
    if not names:
        return
    stored = Lookup(store, Lineage(store).manifest(ref)).names
    known = frozenset(stored)
    unknown = [name for name in names if name not in known and not _may_be_new(name, before, after, known)]
    if unknown:
        raise Problems("checkpoint.partial", [_problem(name, stored, ref) for name in unknown])


def _may_be_new(name: str, before: Job, after: Job, stored: Collection[str]) -> bool:
    """Whether a tensor that the checkpoint lacks may be the job's: presets keep their shapes, so what they add is the
    state of another optimizer, `optim.<parameter>.<moment>`.
    """
    kind, _, rest = name.partition(".")
    if after.model.class_ is not None:
        return kind in ("model", "optim") and bool(rest)
    updates_alike = (before.optimizer, before.local_updates) == (after.optimizer, after.local_updates)
    return kind == "optim" and not updates_alike and f"model.{rest.rpartition('.')[0]}" in stored


def _problem(name: str, stored: Collection[str], ref: CheckpointRef) -> PhalanxError:
    nearest = difflib.get_close_matches(name, stored, n=_NUM_NEAREST, cutoff=_CUTOFF)
    return PhalanxError(
        "checkpoint.partial",
        value=name,
        expected=f"a tensor of the job, or of its checkpoint of {ref}"
        + (f", such as {', '.join(nearest)}" if nearest else ""),
        remedy="correct the name; `phalanx checkpoint show JOB STEP` lists them",
    )
