"""A checkpoint as plain numpy arrays, for notebooks and tools: no torch, no job file, one URL."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import ObjectStore, StorageSettings, open_store
from phalanx.snapshot.dtypes import bfloat16_to_float32
from phalanx.snapshot.fetch import read_tensor
from phalanx.snapshot.index import read_index


def load(url: str, step: int | None = None, *, settings: StorageSettings | None = None) -> dict[str, np.ndarray]:
    """All tensors of a live checkpoint by name, whole, verified.

    url: the job's root, such as `file:///data/projects/p/jobs/demo`. step: the newest live checkpoint where None.
    numpy has no bfloat16: such tensors are widened to float32, which is exact.
    Raises PhalanxError where the job has no such live checkpoint, DamagedCheckpoint where stored bytes are wrong.
    """
    store = open_store(url, settings)
    return dict(iterate(store, live_checkpoint(Lineage(store), step)))


def iterate(store: ObjectStore, ref: CheckpointRef) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of checkpoint `ref` one by one, as `load` gives them; memory of about one tensor."""
    index = read_index(store, Lineage(store).manifest(ref))
    for name, tensor in index.tensors.items():
        values = read_tensor(store, index, tensor)
        yield name, bfloat16_to_float32(values) if tensor.dtype == "bfloat16" else values


def live_checkpoint(lineage: Lineage, step: int | None) -> CheckpointRef:
    """The live checkpoint of `step`, or the newest; PhalanxError names those there are."""
    live = sorted(lineage.checkpoints())
    found = [ref for ref in live if step is None or ref.step == step]
    if not found:
        there = ", ".join(str(ref.step) for ref in live[-8:])
        expected = f"one of the steps {there}" if live else "a job with a committed checkpoint"
        raise PhalanxError(
            "checkpoint", value=step, expected=expected, remedy="`phalanx checkpoint ls` lists what there is"
        )
    return found[-1]
