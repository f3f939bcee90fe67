"""Fills a rank's live tensors from a checkpoint that any other layout may have written: verified, in place, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.core.box import Box, HeldTensor
from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage import Manifest
from phalanx.objects import ObjectStore
from phalanx.snapshot.fetch import Wanted, fetch
from phalanx.snapshot.index import Index, StoredTensor, read_index
from phalanx.snapshot.parts import StoredBox

_REMEDY = "restore with the job that saved it, or name the tensor in `partial`"


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did on this rank: tensors filled, bytes read, and the names in `partial` that were not filled."""

    num_tensors: int
    read_bytes: int
    left_out: tuple[str, ...]


def restore(
    store: ObjectStore,
    manifest: Manifest,
    tensors: Sequence[HeldTensor],
    partial: Collection[str] = (),
    *,
    all_names: Collection[str] | None = None,
) -> RestoreReport:
    """Fills every `tensors[i].local` with its box of the checkpoint.

    partial: names that may be missing on either side (left as they are), each spelt out. all_names: names that all
    ranks hold together; given, a stored tensor outside them is an error ("extra"). Raises Problems that list every
    missing, extra or mismatching tensor before anything is read; DamagedCheckpoint where a byte is not what was written
    (then some tensors may be filled already, each with verified values: don't train on them).
    """
    index = read_index(store, manifest)
    problems = _problems(index, tensors, set(partial), all_names)
    if problems:
        raise Problems(f"checkpoint {manifest.ref}", problems)
    held = [tensor for tensor in tensors if tensor.name in index.tensors]
    read_bytes = fetch(store, index.objects, _wanted(index, held))
    left_out = set(partial) - {tensor.name for tensor in held}
    return RestoreReport(len(held), read_bytes, tuple(sorted(left_out)))


def _problems(
    index: Index, tensors: Sequence[HeldTensor], partial: set[str], all_names: Collection[str] | None
) -> list[PhalanxError]:
    """Every tensor that is missing, does not match or is extra, each with its name."""
    found = (_mismatch(held, index.tensors.get(held.name), partial) for held in tensors)
    problems = [problem for problem in found if problem is not None]
    if all_names is None:
        return problems
    extra = sorted(set(index.tensors) - set(all_names) - partial)
    unknown = sorted(partial - set(index.tensors) - set(all_names))
    problems += [PhalanxError(name, expected="a tensor of this name in the job", remedy=_REMEDY) for name in extra]
    return problems + [
        PhalanxError(f"partial {name}", expected="the name of a tensor", remedy="name it as `checkpoint show` does")
        for name in unknown
    ]


def _mismatch(held: HeldTensor, stored: StoredTensor | None, partial: set[str]) -> PhalanxError | None:
    if stored is None:
        expected = "a tensor of this name in the checkpoint"
        return None if held.name in partial else PhalanxError(held.name, expected=expected, remedy=_REMEDY)
    text = _describe(_dtype(held), held.global_shape)
    wanted = _describe(stored.dtype, stored.global_shape)
    if text == wanted:
        return None
    remedy = "restore with the model that saved it"
    return PhalanxError(held.name, value=text, expected=f"{wanted} as in the checkpoint", remedy=remedy)


def _wanted(index: Index, tensors: Sequence[HeldTensor]) -> list[Wanted]:
    """One entry a stored box that holds something needed, whoever of `tensors` needs it."""
    uses: dict[tuple[str, int], list[tuple[HeldTensor, Box]]] = {}
    for held in tensors:
        for number, stored in enumerate(index.tensors[held.name].boxes):
            common = held.box.intersect(stored.box) if stored.box.num_elements and held.box.num_elements else None
            if common is not None:
                uses.setdefault((held.name, number), []).append((held, common))
    return [_fill(index.tensors[name], number, found) for (name, number), found in uses.items()]


def _fill(tensor: StoredTensor, number: int, uses: list[tuple[HeldTensor, Box]]) -> Wanted:
    stored = tensor.boxes[number]

    def deliver(values: np.ndarray) -> None:
        source = _as_torch(values, stored)
        with torch.no_grad():
            for held, common in uses:
                target = held.local.detach()[held.box.slices_of(common)]
                target.copy_(source[stored.box.slices_of(common)])

    return Wanted(stored, [common for _, common in uses], deliver)


def _as_torch(values: np.ndarray, stored: StoredBox) -> torch.Tensor:
    """The same bytes as a tensor; by way of uint8, since numpy has no bfloat16."""
    raw = torch.from_numpy(values.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, stored.dtype)).view(stored.box.shape)


def _dtype(held: HeldTensor) -> str:
    return str(held.local.dtype).removeprefix("torch.")


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
