"""What the ranks of the restore tests do: fill tensors of their layout from a checkpoint of another, together."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from support.meshes import MeshLayout, boxes_of, shapes_of

from phalanx.core.box import HeldTensor, whole
from phalanx.core.errors import OutsideError
from phalanx.gang import RankContext, init_process_group
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.snapshot.restore import restore

ROWS, COLUMNS = 768, 513


def value_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor, float32, other values in each element and tensor, the same for whoever asks."""
    first = zlib.crc32(name.encode()) % (1 << 23)
    return (torch.arange(math.prod(shape)) + first).float().reshape(shape)


def held_in(layout: MeshLayout, rank: int, *, filled: bool) -> list[HeldTensor]:
    """What the rank holds: its boxes of the true values, or zeros."""
    shapes = shapes_of(ROWS, COLUMNS)
    held = []
    for name, (box, replica, num_replicas) in boxes_of(shapes, layout)[rank].items():
        local = value_of(name, shapes[name])[whole(shapes[name]).slices_of(box)] if filled else torch.zeros(box.shape)
        held.append(HeldTensor(name, shapes[name], box, local.contiguous(), replica, num_replicas))
    return held


def restore_together(context: RankContext) -> None:
    """Restores step after step, each into the layout named for it; reports bytes and whether all are right."""
    import torch.distributed as dist

    from phalanx.snapshot.peers import GlooPeers

    init_process_group(context, 60)
    store = open_store(context.arguments["url"])
    peers = GlooPeers(30, context.arguments["group_size"])
    reports: list[dict[str, object]] = []
    for step, fields in context.arguments["layouts"]:
        held = held_in(MeshLayout(*fields), context.rank, filled=False)
        manifest = Lineage(store).manifest(CheckpointRef(1, step))
        report = restore(store, manifest, held, all_names=list(shapes_of(ROWS, COLUMNS)), peers=peers)
        right = _same(held, held_in(MeshLayout(*fields), context.rank, filled=True))
        reports.append({"read": report.read_bytes, "received": report.received_bytes, "right": right})
    peers.close()
    dist.destroy_process_group()
    context.report("result", reports=reports)


def _same(found: Sequence[HeldTensor], expected: Sequence[HeldTensor]) -> bool:
    return all(torch.equal(a.local, b.local) for a, b in zip(found, expected, strict=True))


def lose_a_reader(context: RankContext) -> None:
    """Rank 1 never joins in; the others must end within the deadline, by name."""
    from phalanx.snapshot.peers import GlooPeers

    init_process_group(context, 60)
    store = open_store(context.arguments["url"])
    peers = GlooPeers(2)
    if context.rank == 1:
        context.report("result", told="")
        raise SystemExit(0)
    try:
        held = held_in(MeshLayout(tp=context.world_size), context.rank, filled=False)
        restore(store, Lineage(store).manifest(CheckpointRef(1, 1)), held, peers=peers)
    except OutsideError as error:
        context.report("result", told=str(error))
