"""NVIDIA H100 SXM, 80 GB.

Peaks, bandwidth and NVLink: the maker's data sheet (2022). sustained: 794 of 989 TFLOP/s by mamf-finder of
stas00/ml-engineering (compute/accelerator). memory_mib: nvidia-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

H100_80 = Gpu(
    name="H100-80",
    bf16_tflops=989,
    fp8_tflops=1979,
    fp4_tflops=0,
    sustained=0.80,
    hbm_tbps=3.35,
    memory_mib=81_559,
    nvlink_gbps=450,
    nvlink_domain=8,
)
