"""Fills a rank's live tensors from a checkpoint that any other layout may have written: verified, in place, bit for
bit. Ranks that restore together read each byte once and hand it to each other (`sharing`).

Tensors whose values lie in a file are filled after the others, a part at a time (`paged`); all ranks of a group take as
many parts as the one that has most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch

from phalanx.core.box import Box, HeldTensor
from phalanx.core.errors import PhalanxError, Problems
from phalanx.lineage import Manifest, keys
from phalanx.objects import ObjectStore
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.fetch import Wanted, fetch
from phalanx.snapshot.flat import bytes_for, scatter
from phalanx.snapshot.index import Index, StoredTensor
from phalanx.snapshot.lookup import read_needed
from phalanx.snapshot.paged import parts_of
from phalanx.snapshot.peers import Peers
from phalanx.snapshot.together import fetch_together

_REMEDY = "restore with the job that saved it, or name the tensor with --partial (in Python: `partial`)"


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did on this rank: tensors filled, and the names in `partial` that were not filled.

    read_bytes: of tensors, from the store. received_bytes: of tensors, from other ranks. index_bytes: read to know
    where they are.
    """

    num_tensors: int
    read_bytes: int
    left_out: tuple[str, ...]
    received_bytes: int = 0
    index_bytes: int = 0


def restore(
    store: ObjectStore,
    manifest: Manifest,
    tensors: Sequence[HeldTensor],
    partial: Collection[str] = (),
    *,
    all_names: Collection[str] | None = None,
    peers: Peers | None = None,
) -> RestoreReport:
    """Fills every `tensors[i].local` with its box of the checkpoint.

    partial: names that may be missing on either side (left as they are), each spelt out. all_names: names that all
    ranks hold together; given, a stored tensor outside them is an error ("extra"). peers: ranks that call this together
    for the same checkpoint, each with its tensors: what they need is read once. Raises Problems that list every
    missing, extra or mismatching tensor before anything is read; DamagedCheckpoint where a byte is not what was written
    (then some tensors may be filled already, wholly or in part, with verified values: don't train on them).
    """
    boxes = _boxes_of(tensors)
    index = read_needed(store, manifest, boxes)
    problems = _problems(index, tensors, set(partial), all_names)
    if problems:
        raise Problems(f"checkpoint {manifest.ref}", problems)
    held = [tensor for tensor in tensors if tensor.name in index.tensors]
    filling = _Filling(store, manifest, index, peers)
    filling.fill([tensor for tensor in held if tensor.paged is None])
    if any(tensor.paged is not None for tensor in tensors):
        filling.fill_paged([tensor for tensor in held if tensor.paged is not None])
    left_out = set(partial) - {tensor.name for tensor in held}
    return RestoreReport(
        len(held), filling.read_bytes, tuple(sorted(left_out)), filling.received_bytes, index.num_bytes
    )


class _Filling:
    """Fills tensors from one checkpoint, and counts the bytes read and received."""

    def __init__(self, store: ObjectStore, manifest: Manifest, index: Index, peers: Peers | None) -> None:
        self._store, self._manifest, self._index, self._peers = store, manifest, index, peers
        self.read_bytes = self.received_bytes = 0

    def fill(self, tensors: Sequence[HeldTensor]) -> None:
        """Those in memory; with peers, all call this together."""
        wanted = _wanted(self._manifest, self._index, tensors)
        if self._peers is None:
            self.read_bytes += fetch(self._store, self._index.objects, wanted)
            return
        found = fetch_together(self._store, self._index, wanted, _boxes_of(tensors), self._peers)
        self.read_bytes += found[0]
        self.received_bytes += found[1]

    def fill_paged(self, tensors: Sequence[HeldTensor]) -> None:
        """Those in a file; with peers, all call this together."""
        sizes = [sum(part.num_bytes for part in parts) for parts in parts_of(tensors)]
        num_rounds = len(sizes)
        if self._peers is not None:
            num_rounds = max(map(int, self._peers.gather(str(num_rounds).encode())))
        rounds, memory = parts_of(tensors), torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for _ in range(num_rounds):
            parts = next(rounds, [])
            starts = accumulate((part.num_bytes for part in parts), initial=0)
            places = (memory[start:stop] for start, stop in pairwise(starts))
            held = [part.in_memory(place) for part, place in zip(parts, places, strict=True)]
            self.fill(held)
            for part, filled in zip(parts, held, strict=True):
                part.write(filled.local)


def _boxes_of(tensors: Sequence[HeldTensor]) -> dict[str, list[Box]]:
    """The boxes that are to be filled, by tensor."""
    boxes: dict[str, list[Box]] = {}
    for held in tensors:
        boxes.setdefault(held.name, []).append(held.box)
    return boxes


def _problems(
    index: Index, tensors: Sequence[HeldTensor], partial: set[str], all_names: Collection[str] | None
) -> list[PhalanxError]:
    """Every tensor that is missing, does not match or is extra, each with its name."""
    found = (_mismatch(held, index.tensors.get(held.name), partial) for held in tensors)
    problems = [problem for problem in found if problem is not None]
    if all_names is None:
        return problems
    extra = sorted(set(index.tensors) - set(all_names) - partial)
    is_same = set(index.tensors) == set(all_names)  # then nothing is left out, and names of what once was do no harm
    unknown = [] if is_same else sorted(partial - set(index.tensors) - set(all_names))
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


def _wanted(manifest: Manifest, index: Index, tensors: Sequence[HeldTensor]) -> list[Wanted]:
    """One entry a stored box that holds something needed, whoever of `tensors` needs it."""
    uses: dict[tuple[str, int], list[tuple[HeldTensor, Box]]] = {}
    for held in tensors:
        num_missing = held.box.num_elements
        for number, stored in enumerate(index.tensors[held.name].boxes):
            common = held.box.intersect(stored.box) if stored.box.num_elements and held.box.num_elements else None
            if common is not None:
                uses.setdefault((held.name, number), []).append((held, common))
                num_missing -= common.num_elements
        if num_missing:
            where = manifest.directory.key if manifest.directory else keys.manifest(manifest.ref)
            raise DamagedCheckpoint(where, "leads to parts that don't hold the whole tensor once", tensor=held.name)
    return [_fill(index.tensors[name], number, found) for (name, number), found in uses.items()]


def _fill(tensor: StoredTensor, number: int, uses: list[tuple[HeldTensor, Box]]) -> Wanted:
    stored = tensor.boxes[number]
    held, common = uses[0]
    target = held.local.detach()[held.box.slices_of(common)]
    memory = bytes_for(target, stored) if len(uses) == 1 else None
    if memory is not None:
        return Wanted(stored, [stored.box], into=lambda: memory)
    put, boxes = partial(scatter, stored, uses), [common for _, common in uses]
    if stored.chunk_bytes % stored.kind.itemsize:  # pieces don't hold whole elements
        return Wanted(stored, boxes, lambda values: put(0, values.reshape(-1).view(np.uint8).data))
    return Wanted(stored, boxes, take=put)


def _dtype(held: HeldTensor) -> str:
    return str(held.local.dtype).removeprefix("torch.")


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
