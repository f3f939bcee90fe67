"""Packed windows on the device, widened there to what a model takes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from phalanx.parallel import SlotBatch
from phalanx.stream.packed import IGNORED_TARGET, PackedWindows

# torch computes with few unsigned types: their bits travel as signed ones, and a mask takes the sign away.
_SIGNED = {2: (np.int16, 0xFFFF), 4: (np.int32, 0xFFFFFFFF)}


def to_device(windows: PackedWindows, num_slots: int, device: torch.device, *, has_documents: bool = True) -> SlotBatch:
    """The windows as int64 tensors [num_slots * local_batch_size, seq_len] on `device`; has_documents: whether document
    ids are made.

    For a GPU what travels lies in page-locked memory, without which a copy would wait for what the GPU has still to do;
    everything else is computed there.
    """
    signed, mask = _SIGNED[windows.tokens.itemsize]
    tokens = _moved(windows.tokens.view(signed), device).to(torch.int64).bitwise_and_(mask)
    starts, ignored = _moved(windows.starts, device), _moved(windows.ignored, device)
    rows, seq_len = windows.shape
    targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)  # `contiguous` may share the memory of tokens
    targets.view(-1).index_fill_(0, ignored, IGNORED_TARGET)
    if not windows.counts.all():
        targets.masked_fill_(~_moved(windows.counts, device)[:, None], IGNORED_TARGET)
    is_start = torch.zeros(rows * seq_len, dtype=torch.int64, device=device).index_fill_(0, starts, 1)
    number = is_start.cumsum(0) - 1
    position_ids = (torch.arange(rows * seq_len, device=device) - starts[number]).view(rows, seq_len)
    document_ids = None
    if has_documents:
        number = number.view(rows, seq_len)
        document_ids = number - number[:, :1]
    return SlotBatch(tokens[:, :-1].contiguous(), targets, position_ids, document_ids, num_slots)


def _moved(array: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
