"""A tensor's memory as plain bytes, and bytes as a tensor; nothing is copied."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.snapshot.parts import StoredBox


def as_torch(values: np.ndarray, stored: StoredBox) -> torch.Tensor:
    """The values of a stored box as a tensor; by way of uint8, since numpy has no bfloat16."""
    raw = torch.from_numpy(values.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, stored.dtype)).view(stored.box.shape)


def bytes_for(target: torch.Tensor, stored: StoredBox) -> np.ndarray | None:
    """The memory of `target`, uint8 [bytes of `stored`], where the box's bytes can lie in it as they are stored: in
    host memory, contiguous, of the same shape and type; else None.
    """
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if not is_plain or tuple(target.shape) != stored.box.shape or target.dtype != getattr(torch, stored.dtype):
        return None
    found: np.ndarray = target.detach().reshape(-1).view(torch.uint8).numpy()
    return found
