"""Writer and reader by hand, rank by rank, as torch's planning calls them: any tiling saves, any other loads."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dcp_kit import start_again
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_job import DTYPES, emptied, random_tensor, same_bits, tilings
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.core.box import Box, whole
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.snapshot.dcp import PhalanxReader, PhalanxWriter
from phalanx.snapshot.verify import verify

Layout = Sequence[Mapping[str, Sequence[Box]]]  # for each rank the boxes of each tensor
WORLD_SIZE = 3


@dataclass
class _Saves(SavePlanner):
    """One rank's state: boxes of whole tensors that the test holds."""

    tensors: Mapping[str, torch.Tensor]
    boxes: Mapping[str, Sequence[Box]]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(name, self.tensors[name], box) for name, boxes in self.boxes.items() for box in boxes])

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = write_item.tensor_data
        assert data is not None
        return _cut(self.tensors[write_item.index.fqn], Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))


@dataclass
class _Loads(LoadPlanner):
    """One rank's state, likewise."""

    tensors: Mapping[str, torch.Tensor]

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("there are tensors alone")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None
        first = tuple(a + b for a, b in zip(offset, read_item.dest_offsets, strict=True))
        return _cut(self.tensors[read_item.dest_index.fqn], Box(first, tuple(read_item.lengths)))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: it was filled in place."""


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_door_between_any_two_tilings_is_bit_equal(data: st.DataObject) -> None:
    """Case 13: uneven and empty boxes in 0 to 3 dimensions, any number of them on a rank, none on another."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = {f"t{n}": random_tensor(s, data.draw(st.sampled_from(DTYPES)), n) for n, s in enumerate(shapes)}
    before, after = _layout(data, tensors), _layout(data, tensors)
    start_again()
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/job"
        _save(url, tensors, before)
        store = open_store(url)
        assert verify(store, Lineage(store).manifest(CheckpointRef(1, 1))) == ()
        found = emptied(tensors)
        for boxes in after:
            _load(url, found, boxes)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def _layout(data: st.DataObject, tensors: Mapping[str, torch.Tensor]) -> Layout:
    ranks: list[dict[str, list[Box]]] = [{} for _ in range(WORLD_SIZE)]
    for name, tensor in tensors.items():
        boxes = data.draw(tilings(tuple(tensor.shape)))
        seen: set[tuple[int, ...]] = set()
        for box in boxes:
            if box.num_elements == 0 and box.offset in seen:
                continue  # torch keeps one of the empty boxes that begin at the same place
            seen.add(box.offset)
            ranks[data.draw(st.integers(0, WORLD_SIZE - 1))].setdefault(name, []).append(box)
    return ranks


def _save(url: str, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """What `dcp.save` does with `WORLD_SIZE` ranks."""
    planners = [_Saves(tensors, boxes) for boxes in layout]
    writers = [PhalanxWriter(url, 1) for _ in layout]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0, rank=rank)
    plans = [
        writer.prepare_local_plan(planner.create_local_plan())
        for writer, planner in zip(writers, planners, strict=True)
    ]
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(plan, planner).value() for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(metadata, results)


def _load(url: str, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[Box]]) -> None:
    """What `dcp.load` does on one rank."""
    reader = PhalanxReader(url)
    metadata = reader.read_metadata()
    items: list[ReadItem] = []
    for name, held in boxes.items():
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        items += create_read_items_for_chunk_list(name, stored, [_chunk(box) for box in held])
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])
    reader.read_data(plan, _Loads(tensors)).wait()


def _item(name: str, tensor: torch.Tensor, box: Box) -> WriteItem:
    data = TensorWriteData(_chunk(box), TensorProperties(dtype=tensor.dtype), tensor.size())
    return WriteItem(MetadataIndex(name, box.offset), WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[whole(tuple(tensor.shape)).slices_of(box)] if box.shape else tensor
