"""A foreign program's state, and the starts of that program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from saved_job import emptied, random_tensor, same_bits, some_tensors

from phalanx.snapshot.dcp import saving, session


def start_again() -> None:
    """What a new start of the program finds in memory: nothing."""
    session._sessions.clear()
    saving.flight._last = None


def url_of(folder: Path) -> str:
    return f"file://{folder}"


def some_state() -> dict[str, Any]:
    """Nested tensors of every type, and values of every kind."""
    return {
        "model": {name.partition(".")[2]: tensor for name, tensor in some_tensors().items()},
        "optim": {
            "state": {"w": {"exp_avg": random_tensor((4, 3), torch.float32, 5)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": ["w"], "fused": None}],
        },
        "step": 7,
        "best": float("inf"),
        "name": "gr\u00fc\u00dfe",
    }


def blank(state: Any) -> Any:
    """The same places with other content."""
    if isinstance(state, torch.Tensor):
        return next(iter(emptied({"": state}).values()))
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list) and state and isinstance(state[0], dict):
        return [blank(value) for value in state]
    return 0


def same(left: Any, right: Any) -> bool:
    """Whether both have the same places with the same bits."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same_bits(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def flip(path: Path, at: int) -> None:
    """Flips one bit of the byte `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
