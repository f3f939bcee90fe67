"""What the training loops of other projects are given: the model with its loss, and windows of a flat file of tokens.

Each of them is started as RANK=0 WORLD_SIZE=1 ... python LOOP.py SETTINGS TOKENS RENDEZVOUS, as `loop.py` does.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder

LR, BETAS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """model: arguments of the decoder. batch: windows of a step, over all ranks."""

    model: Mapping[str, Any]
    seq_len: int
    batch: int
    steps: int


def arguments() -> tuple[Settings, str]:
    """What the command line says: the settings, and where the tokens are."""
    return Settings(**json.loads(Path(sys.argv[1]).read_text())), sys.argv[2]


def lr_factor(step: int, steps: int) -> float:
    """What the learning rate is multiplied with in the step that follows `step` others."""
    return 0.55 + 0.45 * math.cos(math.pi * step / steps)


class Objective(nn.Module):
    """The decoder and the mean cross-entropy of its next tokens."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.decoder = Decoder(DecoderArgs.of_plain(settings.model))

    def forward(self, windows: torch.Tensor) -> dict[str, torch.Tensor]:
        """windows: (batch, seq_len + 1), int64."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        logits = self.decoder(inputs, positions, None)
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())}


class RandomWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows at random places of a flat file of uint16 tokens, the same at each index."""

    def __init__(self, path: str, settings: Settings) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._length, count = settings.seq_len + 1, settings.batch * settings.steps
        self._starts = np.random.default_rng(0).integers(0, len(self._tokens) - self._length, count)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self._starts[index]
        return {"windows": torch.from_numpy(self._tokens[start : start + self._length].astype(np.int64))}
