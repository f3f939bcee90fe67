"""Host memory into which `dcp.async_save` copies a state dict before it returns, kept from save to save.

torch's own stager is used, but not thrown away after each save: the second save copies into memory that is there
already, which is several times faster.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Staging:
    """Memory for one save at a time; where one is still being written, the next gets memory that is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: DefaultStager | None = None

    def stage(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], DefaultStager]:
        """A copy of `state_dict`, tensors on the host, every byte copied at return; and what `give_back` takes."""
        with self._lock:
            stager, self._idle = self._idle or _stager(), None
        staged = stager.stage(state_dict)
        assert isinstance(staged, dict), "staged at once"
        return staged, stager

    def give_back(self, stager: DefaultStager) -> None:
        """The copy is not needed any more: its memory may be used again."""
        with self._lock:
            self._idle = stager


def _stager() -> DefaultStager:
    has_accelerator = torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=has_accelerator,
        )
    )
