"""The StorageReader of `torch.distributed.checkpoint`: fills a state dict from any Phalanx checkpoint, whatever layout
wrote it.

torch's planner says which boxes a rank needs; here whole chunks that hold them are read and verified, and only verified
values reach a tensor. What is stored is described by the parts alone, which are read once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from phalanx.core.box import Box
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, ObjectRef, keys
from phalanx.lineage.leases import leased
from phalanx.objects import ObjectMissing, ObjectStore, StorageSettings
from phalanx.snapshot.arguments import step_of
from phalanx.snapshot.dcp.session import Session, session_at
from phalanx.snapshot.dcp.steps import step_named
from phalanx.snapshot.dcp.values import SUFFIX, NamePath, Values, decode
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.fetch import Wanted, fetch
from phalanx.snapshot.flat import as_torch, bytes_for
from phalanx.snapshot.index import Index, StoredTensor, read_index
from phalanx.snapshot.load import live_checkpoint
from phalanx.snapshot.parts import StoredBox, StoredObject


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose parts and values have been read."""

    ref: CheckpointRef
    index: Index
    values: Mapping[str, object]
    paths: Mapping[str, NamePath]


class PhalanxReader(StorageReader):
    """`dcp.load(state_dict, storage_reader=PhalanxReader(url, step))`.

    url: the root that was saved under, or that of a job of `phalanx run`. step: of a live checkpoint, the newest where
    None; `checkpoint_id` of a call overrides it. It reads one checkpoint at a time.
    """

    def __init__(self, url: str, step: int | None = None, *, settings: StorageSettings | None = None) -> None:
        self._session = session_at(url, settings)
        self._step = None if step is None else step_of(step)
        self._opened: _Opened | None = None

    @property
    def ref(self) -> CheckpointRef | None:
        """The checkpoint that was read last."""
        return self._opened.ref if self._opened else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another load begins; `checkpoint_id` is its step."""
        if checkpoint_id is not None:
            self._step = step_named(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is the number of a step."""
        return str(checkpoint_id).isdecimal()

    def read_metadata(self) -> Metadata:
        """What the checkpoint holds. Raises PhalanxError where there is none of that step, DamagedCheckpoint where its
        manifest, parts or values are not those that were written.
        """
        self._opened = _open(self._session, self._step)
        return _metadata(self._opened)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, and which checkpoint it is for."""
        plan.storage_data = self.ref
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The coordinator's: raises OutsideError where the ranks found different newest checkpoints."""
        refs = {plan.storage_data for plan in plans}
        if len(refs) > 1:
            raise OutsideError(
                f"the ranks found different newest checkpoints at {self._session.store.url}: {sorted(refs)}; another "
                "program saves there at this moment: name the step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads, verifies and delivers everything in the plan; the future is done at return.

        Nothing removes the checkpoint meanwhile. Raises DamagedCheckpoint at the first byte that is not what was
        written. Tensors filled until then hold verified values of this checkpoint.
        """
        assert self._opened is not None, "read_metadata was called"
        opened, tensors = self._opened, [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _put_value(planner, item.dest_index.fqn, opened.values[item.storage_index.fqn])
        store = self._session.store
        with leased(store, opened.ref, "load"):
            _require_kept(store, opened.ref)
            fetch(store, opened.index.objects, _wanted(opened.index, tensors, planner))
        self._session.loaded(opened.ref)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _open(session: Session, step: int | None) -> _Opened:
    ref = live_checkpoint(session.lineage, step)
    index = read_index(session.store, session.lineage.manifest(ref))
    found = [_values(session, item) for key, item in index.objects.items() if key.endswith(SUFFIX)]
    values = {name: value for each in found for name, value in each.values.items()}
    paths = {name: path for each in found for name, path in each.paths.items()}
    return _Opened(ref, index, values, paths)


def _require_kept(store: ObjectStore, ref: CheckpointRef) -> None:
    try:
        store.info(keys.manifest(ref))
    except ObjectMissing as error:
        raise OutsideError(
            f"checkpoint {ref} at {store.url} was removed by retention just before it was read: load again"
        ) from error


def _values(session: Session, item: StoredObject) -> Values:
    try:
        data = session.lineage.read_verified(ObjectRef(item.key, item.num_bytes, item.digest))
    except DamagedObject as error:
        raise DamagedCheckpoint(error.key, error.reason) from error
    return decode(item.key, data)


def _metadata(opened: _Opened) -> Metadata:
    """The checkpoint in torch's words. Chunks of a tensor stand in the order of its stored boxes."""
    described: dict[str, STORAGE_TYPES] = {name: _described(tensor) for name, tensor in opened.index.tensors.items()}
    described |= {name: BytesStorageMetadata() for name in opened.values}
    places = {name: opened.paths.get(name, (name,)) for name in described}
    return Metadata(described, planner_data=places)


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(stored.box.offset), torch.Size(stored.box.shape)) for stored in tensor.boxes
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, tensor.dtype)), torch.Size(tensor.global_shape), chunks
    )


def _put_value(planner: LoadPlanner, name: str, value: object) -> None:
    """Puts a value where the planner keeps it. Its `load_bytes` would unpickle, and there is no pickle."""
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        raise PhalanxError(
            f"planner {type(planner).__name__}",
            value=name,
            expected="DefaultLoadPlanner's way with values that are no tensors: they are JSON, not pickled",
            remedy="derive it from DefaultLoadPlanner without another load_bytes, or load tensors alone",
        )
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value


def _wanted(index: Index, items: Sequence[ReadItem], planner: LoadPlanner) -> list[Wanted]:
    """One entry a stored box of which something is needed, with all items that need it."""
    uses: dict[tuple[str, int], list[ReadItem]] = {}
    for item in items:
        number = _box_number(index.tensors[item.storage_index.fqn], item)
        uses.setdefault((item.storage_index.fqn, number), []).append(item)
    lock = threading.Lock()
    return [
        _delivery(index.tensors[name].boxes[number], found, planner, lock) for (name, number), found in uses.items()
    ]


def _box_number(tensor: StoredTensor, item: ReadItem) -> int:
    """Which stored box the item reads: torch's hint where it is right, else the one that begins at its offset."""
    hint, offset = item.storage_index.index, tuple(item.storage_index.offset or ())
    if hint is not None and hint < len(tensor.boxes) and tensor.boxes[hint].box.offset == offset:
        return hint
    return next(
        number
        for number, stored in enumerate(tensor.boxes)
        if stored.box.offset == offset and stored.box.num_elements > 0
    )


def _delivery(stored: StoredBox, items: Sequence[ReadItem], planner: LoadPlanner, lock: threading.Lock) -> Wanted:
    boxes = [_box(stored, item) for item in items]
    if len(items) == 1 and boxes[0] == stored.box:
        return _Whole(stored, items[0], planner, lock).wanted()

    def deliver(values: np.ndarray) -> None:
        source = as_torch(values, stored)
        for item, box in zip(items, boxes, strict=True):
            with lock:  # planners are not made for several threads
                target = planner.resolve_tensor(item)
            with torch.no_grad():
                target.detach().copy_(source[stored.box.slices_of(box)])
            with lock:
                planner.commit_tensor(item, target)

    return Wanted(stored, boxes, deliver)


class _Whole:
    """The delivery of a whole stored box to one item: straight into its tensor where that holds it as it is stored."""

    def __init__(self, stored: StoredBox, item: ReadItem, planner: LoadPlanner, lock: threading.Lock) -> None:
        self._stored, self._item, self._planner, self._lock = stored, item, planner, lock
        self._target: torch.Tensor | None = None
        self._is_there = False

    def wanted(self) -> Wanted:
        """What `fetch` is asked for."""
        return Wanted(self._stored, [self._stored.box], self._deliver, self._into)

    def _into(self) -> np.ndarray | None:
        with self._lock:
            self._target = self._planner.resolve_tensor(self._item)
        memory = bytes_for(self._target, self._stored)
        self._is_there = memory is not None
        return memory

    def _deliver(self, values: np.ndarray) -> None:
        assert self._target is not None, "the box has landed"
        if not self._is_there:
            with torch.no_grad():
                self._target.detach().copy_(as_torch(values, self._stored))
        with self._lock:
            self._planner.commit_tensor(self._item, self._target)


def _box(stored: StoredBox, item: ReadItem) -> Box:
    """What the item reads, in global indices."""
    offset = tuple(a + b for a, b in zip(stored.box.offset, item.storage_offsets, strict=True))
    return Box(offset, tuple(item.lengths))
