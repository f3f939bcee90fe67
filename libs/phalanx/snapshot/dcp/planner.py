"""The planners of `save` and `load`: they say everything that does not fit at once, and let nothing be left out unsaid.

torch's own for loads names the first missing key only, converts types silently, and drops what the checkpoint has of an
object that the program's lacks (the state of an optimizer that has not stepped yet).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from phalanx.core.errors import PhalanxError, Problems
from phalanx.snapshot.dcp.given import require_fillable, require_storable


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a rank loads: flat names, and the keys at the top of its state dict."""

    names: tuple[str, ...]
    tops: tuple[str, ...]


class CheckedSavePlanner(DefaultSavePlanner):
    """torch's own, after a look at what is saved."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Raises Problems that name everything that no checkpoint can hold, and names that stand for two values."""
        require_storable(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class CheckedPlanner(DefaultLoadPlanner):
    """partial: names that may be missing on either side."""

    def __init__(self, partial: Collection[str]) -> None:
        super().__init__(allow_partial_load=True)
        self._partial = frozenset(partial)
        self._tops: tuple[str, ...] = ()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Raises Problems that name every tensor that nothing can be read into, and names that stand for two values."""
        require_fillable(state_dict)
        self._tops = tuple(sorted(map(str, state_dict)))  # those too that have nothing below them
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Raises Problems that name every value that is missing in the checkpoint, or differs in kind, type, shape."""
        assert self.metadata is not None, "set_up_planner was called"
        stored = self.metadata.state_dict_metadata
        found = (
            _misfit(name, value, stored.get(name))
            for name, value in self.state_dict.items()
            if name in stored or name not in self._partial
        )
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise Problems("state dict", problems)
        plan = super().create_local_plan()
        plan.planner_data = _Asked(tuple(self.state_dict), self._tops)
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raises Problems that name every value that the checkpoint has below a key that was asked for, and no rank
        asked for.
        """
        assert self.metadata is not None, "set_up_planner was called"
        asked = {name for plan in global_plan for name in plan.planner_data.names}
        tops = {top for plan in global_plan for top in plan.planner_data.tops}
        places: dict[str, tuple[Any, ...]] = self.metadata.planner_data
        extra = sorted(name for name, path in places.items() if str(path[0]) in tops and name not in asked)
        problems = [_extra(name) for name in extra if name not in self._partial]
        problems += [_unknown(name) for name in sorted(self._partial - asked - places.keys())]
        if problems:
            raise Problems("state dict", problems)
        return super().create_global_plan(global_plan)


def _misfit(name: str, value: object, stored: STORAGE_TYPES | None) -> PhalanxError | None:
    if stored is None:
        return PhalanxError(
            name,
            expected="a value of this name in the checkpoint",
            remedy="load with the program that saved it, or name it in `partial` to leave it as it is",
        )
    here, there = _described(value), _stored(stored)
    if here == there:
        return None
    return PhalanxError(
        name,
        value=here,
        expected=f"{there}, as in the checkpoint",
        remedy="load with the model that saved it (dcp.load with PhalanxReader converts types)",
    )


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.size())}"


def _stored(stored: STORAGE_TYPES) -> str:
    if not isinstance(stored, TensorStorageMetadata):
        return "no tensor"
    return f"{str(stored.properties.dtype).removeprefix('torch.')} {list(stored.size)}"


def _extra(name: str) -> PhalanxError:
    return PhalanxError(
        name,
        expected="a place for it in the state dict: the checkpoint has it",
        remedy="fill the state dict first (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict makes an "
        "optimizer's state), or name it in `partial` to leave it out",
    )


def _unknown(name: str) -> PhalanxError:
    return PhalanxError(
        f"partial {name}",
        expected="a name in the state dict or in the checkpoint",
        remedy="name it as `phalanx checkpoint show` does",
    )
