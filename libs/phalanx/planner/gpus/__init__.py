"""What the planner knows of GPUs: one file a kind, and the kinds by name."""

from __future__ import annotations

from phalanx.planner.gpus.catalog import GPUS, find_gpu, gpu_memory_bytes
from phalanx.planner.gpus.kind import Gpu

__all__ = ["GPUS", "Gpu", "find_gpu", "gpu_memory_bytes"]
