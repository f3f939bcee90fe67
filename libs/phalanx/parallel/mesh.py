"""The one mesh of a gang: axes pp, dp_replicate, dp_shard, cp, tp in this order (tp innermost), and the process groups
that they need.

Groups are made one by one, by their members only: `init_device_mesh` would have all ranks make every group of every
axis, also the axes of size 1, and each costs a rendezvous. The DeviceMesh is put together from the groups that exist.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.errors import PhalanxError
from phalanx.parallel.schedules import is_v_shaped
from phalanx.spec import Layout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SHARD_AXES = ("dp_shard", "cp")
_STAGE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_DATA_AXES = ("dp_replicate", *_SHARD_AXES)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes, this rank's coordinates and its groups by axis.

    groups: of the axes that exchange anything (size above 1), and "dp_shard_cp", over which fully_shard shards: the
    ranks that read other windows and those that share one hold parts of the same weights. It exists at any size.
    schedule: the pipeline schedule, which decides where the last stage lies. ep: ranks that share the experts of a
    layer, consecutive ones of "dp_shard_cp", by the group "ep"; those that hold the same ones shard them over
    "expert_shard".
    """

    sizes: dict[str, int]
    coordinates: dict[str, int]
    groups: dict[str, dist.ProcessGroup]
    device: torch.device
    schedule: str
    ep: int = 1

    @property
    def dp_size(self) -> int:
        """Ranks that read different windows."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_size` readers this rank belongs to."""
        return self.coordinates["dp_replicate"] * self.sizes["dp_shard"] + self.coordinates["dp_shard"]

    @property
    def shard_size(self) -> int:
        """Ranks that share weights and optimizer state: dp_shard x cp."""
        return self.sizes["dp_shard"] * self.sizes["cp"]

    @property
    def shard_rank(self) -> int:
        """Which of the `shard_size` parts is this rank's."""
        return self.coordinates["dp_shard"] * self.sizes["cp"] + self.coordinates["cp"]

    @property
    def is_reader(self) -> bool:
        """Whether this rank writes down the windows that its dp rank read: one rank per dp rank does."""
        return self.coordinates["pp"] == self.coordinates["cp"] == self.coordinates["tp"] == 0

    @property
    def has_loss(self) -> bool:
        """Whether this rank's loss is counted: it holds the last stage, and is the first of its tp group. Ranks
        of one cp group each count their part of the windows.
        """
        last = 0 if is_v_shaped(self.schedule) else self.sizes["pp"] - 1
        return self.coordinates["pp"] == last and self.coordinates["tp"] == 0

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group; None where tp is 1."""
        return self.groups.get("tp")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The context-parallel group; None where cp is 1."""
        return self.groups.get("cp")

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same as this one in the other replicas; None where dp_replicate is 1."""
        return self.groups.get("dp_replicate")

    def data_mesh(self, *, within_replica: bool = False) -> DeviceMesh:
        """The mesh for fully_shard: (dp_shard_cp,), or (dp_replicate, dp_shard_cp) where copies exist, unless it is to
        leave them alone.
        """
        shard = self.groups["dp_shard_cp"]
        if within_replica or self.sizes["dp_replicate"] == 1:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=("dp_shard_cp",))
        ranks = [self._rank_at(dict(zip(_DATA_AXES, point, strict=True))) for point in self._points(_DATA_AXES)]
        return DeviceMesh.from_group(
            [self.groups["dp_replicate"], shard],
            self.device.type,
            mesh=torch.tensor(ranks).view(self.sizes["dp_replicate"], self.shard_size),
            mesh_dim_names=("dp_replicate", "dp_shard_cp"),
        )

    def expert_mesh(self, *, within_replica: bool = False) -> DeviceMesh:
        """As `data_mesh`, of the experts of a rank: over those that hold the same ones."""
        shard = self.groups["expert_shard"]
        if within_replica or self.sizes["dp_replicate"] == 1:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=("expert_shard",))
        ranks = [self._rank_at(dict(zip(_DATA_AXES, point, strict=True))) for point in self._points(_DATA_AXES)]
        own = torch.tensor(ranks).view(self.sizes["dp_replicate"], -1, self.ep)[:, :, self.shard_rank % self.ep]
        return DeviceMesh.from_group(
            [self.groups["dp_replicate"], shard],
            self.device.type,
            mesh=own,
            mesh_dim_names=("dp_replicate", "expert_shard"),
        )

    def stage_group(self) -> dist.ProcessGroup | None:
        """A new group of the ranks that hold the same pipeline stages; None where this rank is alone. All ranks call
        this together.
        """
        if math.prod(self.sizes[axis] for axis in _STAGE_AXES) == 1:
            return None
        return _group(self.sizes, self.coordinates, _STAGE_AXES, _gang_timeout(self.device))

    def _points(self, axes: Sequence[str]) -> itertools.product[tuple[int, ...]]:
        return itertools.product(*(range(self.sizes[axis]) for axis in axes))

    def _rank_at(self, moved: dict[str, int]) -> int:
        return _rank_at(self.sizes, self.coordinates | moved)


def build_mesh(layout: Layout, device: torch.device | str, *, schedule: str = "1f1b") -> Mesh:
    """The mesh over the default process group, which must have exactly the layout's ranks. Collectives on the mesh's
    groups have the default group's deadline. All ranks call this together.
    """
    sizes = {axis: int(getattr(layout, axis)) for axis in AXES}
    world_size = dist.get_world_size()
    if math.prod(sizes.values()) != world_size:
        raise PhalanxError(
            "[parallel]",
            value=" x ".join(f"{axis}={size}" for axis, size in sizes.items()),
            expected=f"axis sizes whose product is the number of ranks ({world_size})",
            remedy="change the sizes or the number of ranks",
        )
    coordinates = _coordinates(sizes, dist.get_rank())
    timeout = _gang_timeout(torch.device(device))
    groups = {
        axis: _group(sizes, coordinates, (axis,), timeout) for axis in AXES if sizes[axis] > 1 and axis != "dp_shard"
    }
    groups["dp_shard_cp"] = _group(sizes, coordinates, _SHARD_AXES, timeout)
    if layout.ep > 1:
        ranks = dist.get_process_group_ranks(groups["dp_shard_cp"])
        place = ranks.index(dist.get_rank())
        first = place - place % layout.ep
        groups["ep"] = _group_of(ranks[first : first + layout.ep], timeout, "ep")
        groups["expert_shard"] = _group_of(ranks[place % layout.ep :: layout.ep], timeout, "expert_shard")
    return Mesh(sizes, coordinates, groups, torch.device(device), schedule, layout.ep)


def _gang_timeout(device: torch.device) -> timedelta:
    """The default group's deadline, which new_group would not inherit."""
    assert dist.group.WORLD is not None, "init_process_group comes first"
    timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    return timeout


def _group(
    sizes: dict[str, int], coordinates: dict[str, int], axes: Sequence[str], timeout: timedelta
) -> dist.ProcessGroup:
    """The ranks that differ from this one along `axes` alone, the last of them innermost."""
    points = itertools.product(*(range(sizes[axis]) for axis in axes))
    ranks = [_rank_at(sizes, coordinates | dict(zip(axes, point, strict=True))) for point in points]
    return _group_of(ranks, timeout, "_".join(axes))


def _group_of(ranks: list[int], timeout: timedelta, name: str) -> dist.ProcessGroup:
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=name)
    assert isinstance(group, dist.ProcessGroup), "a rank is always a member of its own axis group"
    return group


def _coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    coordinates = {}
    for axis in reversed(AXES):
        rank, coordinates[axis] = divmod(rank, sizes[axis])
    return coordinates


def _rank_at(sizes: dict[str, int], coordinates: dict[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * sizes[axis] + coordinates[axis]
    return rank
