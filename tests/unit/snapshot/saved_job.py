"""A job with checkpoints in a real file store, for the tests of this folder: tensors, layouts and saves by several
ranks of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from hypothesis import strategies as st

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.snapshot import commit
from phalanx.snapshot.writer import Writer

DIGEST = "sha256:" + "0" * 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
Layout = Sequence[Sequence[HeldTensor]]  # the tensors of each rank


def file_store(folder: Path) -> ObjectStore:
    return open_store(f"file://{folder}")


def open_attempt(store: ObjectStore, avoid: Sequence[CheckpointRef] = ()) -> int:
    attempt = Lineage(store).open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}, avoid=avoid)
    return attempt.number


def draft(attempt: int, step: int) -> Manifest:
    return Manifest(attempt, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, step * 8), {"lr": 0.1}, (), ())


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes as a tensor of `dtype`, so that NaN payloads and all exponents occur; valid values for bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    count = int(torch.empty(shape, device="meta").numel())
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def some_tensors() -> dict[str, torch.Tensor]:
    """A small model with optimizer state: every type, a scalar, an empty tensor, one of several chunks."""
    tensors = {f"model.{str(dtype)[6:]}": random_tensor((6, 5), dtype, seed) for seed, dtype in enumerate(DTYPES)}
    tensors["model.large"] = random_tensor((700, 1030), torch.float32, 99)
    tensors["optim.step"] = torch.tensor(7.0)
    tensors["model.empty"] = torch.zeros(0, 3)
    return tensors


def rows_of(tensors: Mapping[str, torch.Tensor], world_size: int) -> list[list[HeldTensor]]:
    """Each tensor cut along its first dimension over all ranks (uneven and empty shares too); scalars held by all."""
    ranks: list[list[HeldTensor]] = [[] for _ in range(world_size)]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for rank, held in enumerate(ranks):
            if not shape:
                held.append(HeldTensor(name, shape, Box((), ()), tensor, rank, world_size))
                continue
            share = -(-shape[0] // world_size)
            start, stop = min(rank * share, shape[0]), min((rank + 1) * share, shape[0])
            box = Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
            held.append(HeldTensor(name, shape, box, tensor[start:stop]))
    return ranks


def whole_of(tensors: Mapping[str, torch.Tensor]) -> list[HeldTensor]:
    return [HeldTensor(name, tuple(t.shape), whole(tuple(t.shape)), t) for name, t in tensors.items()]


def save(store: ObjectStore, attempt: int, step: int, layout: Layout, object_bytes: int = 1 << 28) -> Manifest:
    """Saves and commits one checkpoint, all ranks in this process."""
    world_size = len(layout)
    writers = [Writer(store, rank, world_size, object_bytes=object_bytes) for rank in range(world_size)]
    pending = [writer.save(attempt, step, held) for writer, held in zip(writers, layout, strict=True)]
    expected = {rank: save_.wait(30) for rank, save_ in enumerate(pending)}
    return commit(Lineage(store), store, draft(attempt, step), world_size, 30, expected=expected)


def emptied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes and types, holding other values."""
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
        )
    )


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile `shape` exactly once: random cuts, again and again, empty boxes included."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        boxes += _cut(box, draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 8)))
    return boxes


def _cut(box: Box, axis: int, at: int) -> Iterator[Box]:
    at = min(at, box.shape[axis])
    for start, size in ((0, at), (at, box.shape[axis] - at)):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis], shape[axis] = offset[axis] + start, size
        yield Box(tuple(offset), tuple(shape))
