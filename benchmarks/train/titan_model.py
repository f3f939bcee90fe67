"""What both ways into torchtitan (titan_by_spec.py, titan_by_config.py) give it: the windows of all peers as its
loader, and how the weights of torch's own modules begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import titan_device
import torch
from torch.utils.data import DataLoader
from windows import RandomWindows, Settings

IS_COMPILED = titan_device.NAME == "cuda"
PRECISION = "bfloat16" if titan_device.NAME == "cuda" else "float32"


def begin_weights(model: torch.nn.Module) -> None:
    """As torch's own modules begin theirs; norms with ones."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            torch.nn.init.ones_(module.weight)


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    """Those of whole windows. tokens: int64 [B, S]."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


class Windows:
    """What torchtitan asks of its loader, over the windows of all peers; this rank's part of each step."""

    def __init__(self, tokens: str, settings: Settings, rank: int, ranks: int) -> None:
        self._windows = RandomWindows(tokens, settings)
        mine = range(rank, len(self._windows), ranks)
        pinned = titan_device.NAME == "cuda"
        self._loader = DataLoader(self._windows, settings.batch // ranks, sampler=mine, pin_memory=pinned)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self._loader:
            yield {"input": batch["windows"][:, :-1]}, batch["windows"][:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is restored."""


class Lines:
    """Prints a line behind each step of the trainer that this is mixed into."""

    step: int

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)  # type: ignore[misc]
        if torch.distributed.get_rank() == 0:
            print(f"step {self.step}", flush=True)
