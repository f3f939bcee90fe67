"""Tensors slab by slab: every element once, in order, however the tensor was cut and is cut now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_job import DTYPES, file_store, open_attempt, random_tensor, save, tilings

from phalanx.core.box import Box, HeldTensor
from phalanx.snapshot.index import read_index
from phalanx.snapshot.slabs import batches, read_slabs, row_boxes

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(SHAPES, st.integers(0, 60))
def test_row_boxes_tile_in_row_major_order(shape: tuple[int, ...], most: int) -> None:
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    boxes = list(row_boxes(shape, most))
    found = [numbers[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] for box in boxes]
    assert np.array_equal(np.concatenate([each.reshape(-1) for each in found]), numbers.reshape(-1))
    assert all(box.num_elements <= max(1, most) for box in boxes)


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_read_slabs_of_any_tiling_give_every_bit(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder: Path = tmp_path_factory.mktemp("job")
    tensors = {
        f"t{n}": random_tensor(data.draw(SHAPES), data.draw(st.sampled_from(DTYPES)), n)
        for n in range(data.draw(st.integers(1, 4)))
    }
    held = [
        HeldTensor(name, tuple(tensor.shape), box, tensor[_slices(box)].contiguous())
        for name, tensor in tensors.items()
        for box in data.draw(tilings(tuple(tensor.shape)))
    ]
    store = file_store(folder)
    index = read_index(store, save(store, open_attempt(store), 5, [_first_of_each_box(held)]))
    raw = dict.fromkeys(tensors, b"")
    for batch in batches(index.tensors.values(), data.draw(st.integers(0, 200))):
        assert len({slab.tensor.name for slab in batch}) == len(batch)
        for slab, values in zip(batch, read_slabs(store, index, batch), strict=True):
            raw[slab.tensor.name] += values.tobytes()
    assert raw == {name: _bytes(tensor) for name, tensor in tensors.items()}


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))


def _first_of_each_box(held: list[HeldTensor]) -> list[HeldTensor]:
    """Cuts can give the same empty box twice, which no rank writes."""
    return list({(each.name, each.box): each for each in held}.values())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
