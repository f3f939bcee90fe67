"""The device that this rank computes on."""

from __future__ import annotations

import os

import torch


def open_device(kind: str, *, deterministic: bool) -> torch.device:
    """The rank's own device, with its index, made current in this thread; call it before anything else uses CUDA.

    kind: `[cluster] device`. deterministic: only deterministic kernels; cuBLAS reads at its start whether it must keep
    its work space apart for each stream.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
