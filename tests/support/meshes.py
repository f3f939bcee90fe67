"""Layouts of a small model over meshes: which box of which tensor each rank holds, as the trainer cuts them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.box import Box, whole

NUM_LAYERS = 4


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Ranks in the order (pp, dp, tp), tp fastest. zero: dp cuts the first dimension of what tp left, else replicas."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinates(self) -> Iterator[tuple[int, int, int]]:
        """(pp, dp, tp) of each rank, by rank."""
        return itertools.product(range(self.pp), range(self.dp), range(self.tp))


def shapes_of(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a model of `NUM_LAYERS` layers, with both moments of each, and a scalar."""
    shapes: dict[str, tuple[int, ...]] = {"optim.step": ()}
    for layer in range(NUM_LAYERS):
        named = {"attention.wq.weight": (rows, columns), "attention.wo.weight": (columns, rows), "norm.weight": (rows,)}
        for name, shape in named.items():
            parameter = f"layers.{layer}.{name}"
            shapes |= {f"model.{parameter}": shape}
            shapes |= {f"optim.{parameter}.{moment}": shape for moment in ("exp_avg", "exp_avg_sq")}
    return shapes


def boxes_of(shapes: Mapping[str, tuple[int, ...]], layout: MeshLayout) -> list[dict[str, tuple[Box, int, int]]]:
    """For each rank and tensor that it holds: the box, which of its replicas this one is, and how many there are."""
    ranks: list[dict[str, tuple[Box, int, int]]] = []
    for pp, dp, tp in layout.coordinates():
        held: dict[str, tuple[Box, int, int]] = {}
        for name, shape in shapes.items():
            layer = _layer(name)
            if layer is not None and layer * layout.pp // NUM_LAYERS != pp:
                continue
            stages = range(layout.pp) if layer is None else [pp]
            cut = _tp_cut(name, shape, layout.tp)
            box = cut[tp] if cut else whole(shape)
            is_cut = layout.zero and bool(shape)
            box = split(box, 0, layout.dp)[dp] if is_cut else box
            holders = [
                (stage, other_dp, other_tp)
                for stage in stages
                for other_dp in ([dp] if is_cut else range(layout.dp))
                for other_tp in ([tp] if cut else range(layout.tp))
            ]
            held[name] = (box, holders.index((pp, dp, tp)), len(holders))
        ranks.append(held)
    return ranks


def split(box: Box, axis: int, count: int) -> list[Box]:
    """As torch.chunk cuts: equal shares but for the last ones, which may be smaller or empty."""
    share = -(-box.shape[axis] // count)
    found: list[Box] = []
    for number in range(count):
        start, stop = (min(at * share, box.shape[axis]) for at in (number, number + 1))
        offset, shape = list(box.offset), list(box.shape)
        offset[axis], shape[axis] = offset[axis] + start, stop - start
        found.append(Box(tuple(offset), tuple(shape)))
    return found


def held_bytes(shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[Mapping[str, object]], itemsize: int) -> int:
    """Bytes of the boxes of all ranks, those that several hold alike counted once."""
    boxes = {(name, held[0]) for rank in ranks for name, held in rank.items()}  # type: ignore[index]
    return sum(box.num_elements * itemsize for _, box in boxes)


def _layer(name: str) -> int | None:
    words = name.split(".")
    return int(words[words.index("layers") + 1]) if "layers" in words else None


def _tp_cut(name: str, shape: tuple[int, ...], count: int) -> list[Box] | None:
    """Columns of the output projection, rows of the others; norms are held by all."""
    if len(shape) < 2:
        return None
    return split(whole(shape), 1 if ".wo." in name else 0, count)
