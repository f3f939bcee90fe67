"""Full recompute under a split backward: a block's inside is computed again once, at the first of the backward passes
over its graph, and goes with the nodes that need it.

As torch.utils.checkpoint without reentry: in forward the graph saves placeholders; the first that is asked for has the
block run again, which fills all that are left, and stops at the last one. There each pass over the graph has what was
computed again for itself, here a placeholder owns its tensor: one that is gone with its node takes it along, so in a
whole backward memory is let go of node by node, and between the halves of a split one it stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states


class _Saved:
    """Stands in the graph for a tensor of this shape and type, and holds it once it is computed again."""

    __slots__ = ("__weakref__", "dtype", "shape", "value")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.value: Tensor | None = None


class _Complete(Exception):
    """Ends a second run of a block: the last tensor that its backward needs is there."""


class _Inside:
    """What one forward of a block saved. again: runs it once more."""

    def __init__(self, again: Callable[[], None]) -> None:
        self._again: Callable[[], None] | None = again
        self._saved: list[weakref.ref[_Saved]] = []
        self._num_filled = 0

    def forward(self) -> saved_tensors_hooks:
        """Around the block's forward."""
        return saved_tensors_hooks(self._leave_out, self._value)

    def _leave_out(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _value(self, saved: _Saved) -> Tensor:
        if saved.value is None:
            self._fill()
        assert saved.value is not None, "filled by the block's second run"
        return saved.value

    def _fill(self) -> None:
        again, self._again = self._again, None
        assert again is not None, "each placeholder is filled at the first run"
        try:
            with saved_tensors_hooks(self._fill_next, _itself), torch.enable_grad():
                again()
        except _Complete:
            return
        raise RuntimeError(
            f"recompute: the block's forward kept {len(self._saved)} tensors for backward, its second run "
            f"{self._num_filled}: both must do the same"
        )

    def _fill_next(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # else one that its own node saves would hold that node, and so itself
        saved = self._saved[self._num_filled]()
        self._num_filled += 1
        if saved is not None:
            if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"recompute: tensor {self._num_filled} that the block's forward kept for backward was "
                    f"{tuple(saved.shape)} {saved.dtype}, in its second run {tuple(tensor.shape)} {tensor.dtype}: both "
                    "must do the same"
                )
            saved.value = tensor
        if self._num_filled == len(self._saved):
            raise _Complete
        return tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def split_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` of a block, with the same bits, whose inside backward computes again. Backward raises RuntimeError
    where the second run keeps other tensors than the first.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    host_state = torch.get_rng_state()
    devices, device_states = get_device_states(*args, *kwargs.values())

    def again() -> None:
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(host_state)
            set_device_states(devices, device_states)
            forward(*map(_cut_off, args), **{name: _cut_off(value) for name, value in kwargs.items()})

    with _Inside(again).forward():
        return forward(*args, **kwargs)


def _cut_off(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
