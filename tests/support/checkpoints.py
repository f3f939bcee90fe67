"""Registered jobs with small checkpoints, written as ranks write them, but with numpy alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from phalanx.core import step_parts
from phalanx.core.box import Box
from phalanx.core.digest import sha256, xxh3
from phalanx.lineage import Attempt, CheckpointRef, Lineage, LoaderState, Manifest, ObjectRef, keys
from phalanx.lineage.records import StepRows, WindowRows
from phalanx.lineage.registry import Origin, RegisteredJob, Registry
from phalanx.objects import ObjectStore
from phalanx.snapshot.commit import commit
from phalanx.snapshot.grouping import safetensors_header
from phalanx.snapshot.load import iterate
from phalanx.snapshot.parts import CHUNK_BYTES, Part, StoredBox, StoredObject, part_bytes

IDENTITY, CODE, PLACEMENT = sha256(b"identity"), sha256(b"code"), sha256(b"placement")
ROWS, COLUMNS = 2, 3


def spec_of(name: str, storage: str, **checkpoint: Any) -> dict[str, Any]:
    """A job file as plain tables."""
    return {
        "job": {"name": name, "project": "p", "storage": storage},
        "model": {"preset": "tiny"},
        "data": {"train": "file:///nowhere/train"},
        "training": {"seq_len": 32, "steps": 100, "global_batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "lr_scheduler": {"total_steps": 100},
        "checkpoint": checkpoint,
    }


def register(root: ObjectStore, name: str, origin: Origin | None = None, **checkpoint: Any) -> RegisteredJob:
    """Registers a job whose storage is the cluster's root."""
    job = RegisteredJob("p", name, root.url, spec_of(name, root.url, **checkpoint), f"r-{name}", "tests", origin=origin)
    return Registry(root).create_job(job)


def open_attempt(store: ObjectStore, avoid: Sequence[CheckpointRef] = ()) -> Attempt:
    """The next attempt of the job whose root `store` is."""
    return Lineage(store).open_attempt(code_digest=CODE, identity_digest=IDENTITY, placement={}, avoid=avoid)


def a_draft(ref: CheckpointRef, world_size: int = 1) -> Manifest:
    """What a rank knows of a manifest."""
    loader = LoaderState(ref.step, ref.step * 8)
    schedule: dict[str, int | float] = {"tokens": ref.step * 256, "loss_scale": 1.5}
    return Manifest(ref.attempt, ref.step, world_size, IDENTITY, PLACEMENT, CODE, IDENTITY, loader, schedule, (), ())


def write_parts(
    store: ObjectStore,
    ref: CheckpointRef,
    world_size: int = 1,
    ranks: Sequence[int] | None = None,
    first_step: int = 0,
    loss: float | None = None,
) -> None:
    """What the ranks write of a checkpoint: each an object, its step records, and its part object last. loss: of every
    step in the records; None records none.
    """
    for rank in range(world_size) if ranks is None else ranks:
        item, box = _write_object(store, ref, rank, world_size)
        records = (_write_records(store, ref, first_step or ref.step, loss),) if rank == 0 else ()
        part = Part(ref.attempt, ref.step, rank, world_size, (item,), (box,), records)
        store.create(keys.part(ref, rank), part_bytes(part))


def save(
    store: ObjectStore,
    ref: CheckpointRef,
    world_size: int = 1,
    first_step: int = 0,
    loss: float | None = None,
    **notes: Any,
) -> Manifest:
    """Writes and commits a checkpoint. notes: what else its manifest says (`speculative`, `metrics`)."""
    write_parts(store, ref, world_size, first_step=first_step, loss=loss)
    draft = dataclasses.replace(a_draft(ref, world_size), **notes)
    return commit(Lineage(store), store, draft, world_size, 30)


def values_of(ref: CheckpointRef) -> np.ndarray:
    """One rank's rows of the only tensor in a checkpoint."""
    return np.full((ROWS, COLUMNS), ref.attempt * 1000 + ref.step, np.float32)


def restores(store: ObjectStore, ref: CheckpointRef) -> bool:
    """Whether the checkpoint can be read, whole and with the values that were saved; raises where it is damaged."""
    tensors = dict(iterate(store, ref))
    return list(tensors) == ["model.w"] and bool((tensors["model.w"] == values_of(ref)[0, 0]).all())


def database_url(folder: Path) -> str:
    """A database of its own."""
    return f"sqlite:///{folder / 'checkpoint.sqlite'}"


def _write_object(store: ObjectStore, ref: CheckpointRef, rank: int, world_size: int) -> tuple[StoredObject, StoredBox]:
    data = values_of(ref).tobytes()
    header = safetensors_header([("model.w", "float32", (ROWS, COLUMNS), 0, len(data))], {})
    key, content = keys.tensors(ref, keys.number(rank), 0), header + data
    store.create(key, content)
    box = Box((rank * ROWS, 0), (ROWS, COLUMNS))
    chunks = (xxhash.xxh3_64_hexdigest(data),)
    stored = StoredBox("model.w", "float32", (ROWS * world_size, COLUMNS), box, key, 0, CHUNK_BYTES, chunks)
    return StoredObject(key, len(content), xxh3(content), len(header)), stored


def _write_records(store: ObjectStore, ref: CheckpointRef, first_step: int, loss: float | None) -> ObjectRef:
    steps = np.arange(first_step, ref.step + 1, dtype=np.int64)
    count = len(steps)
    windows = WindowRows(
        step=steps,
        position=steps - 1,
        weight=np.ones(count, np.float32),
        xxh3=steps.astype(np.uint64),
        segment_window=np.arange(count, dtype=np.int64),
        shard=np.zeros(count, np.int64),
        member=np.zeros(count, np.int64),
        offset=steps * 8,
        length=np.full(count, 8, np.int64),
    )
    rows = StepRows.concatenate(()) if loss is None else _step_rows(steps, loss)
    return Lineage(store).records.put(ref.attempt, 0, first_step, ref.step, windows, rows)


def _step_rows(steps: np.ndarray, loss: float) -> StepRows:
    ones = np.ones(len(steps))
    return StepRows(
        steps, ones * loss, ones, np.full(len(steps), 256, np.int64), ones, *[ones / 8] * len(step_parts.Part)
    )
