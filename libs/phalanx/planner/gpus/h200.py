"""NVIDIA H200 SXM, 141 GB.

Peaks, bandwidth and NVLink: the maker's data sheet (2023). sustained: the H100's, whose cores and power limit it has.
memory_mib: nvidia-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

H200_141 = Gpu(
    name="H200-141",
    bf16_tflops=989,
    fp8_tflops=1979,
    fp4_tflops=0,
    sustained=0.80,
    hbm_tbps=4.8,
    memory_mib=143_771,
    nvlink_gbps=450,
    nvlink_domain=8,
)
