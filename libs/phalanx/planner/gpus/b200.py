"""NVIDIA B200, 180 GB, in boards of eight.

Peaks, bandwidth and NVLink: the maker's data sheet (2024). sustained: 1,745 of 2,250 TFLOP/s by mamf-finder of
stas00/ml-engineering (compute/accelerator). memory_mib: nvidia-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

B200_192 = Gpu(
    name="B200-192",
    bf16_tflops=2250,
    fp8_tflops=4500,
    fp4_tflops=9000,
    sustained=0.775,
    hbm_tbps=8.0,
    memory_mib=183_359,
    nvlink_gbps=900,
    nvlink_domain=8,
)
