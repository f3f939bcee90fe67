"""NVIDIA GB200, 186 GB, in racks of 72 GPUs (NVL72).

Peaks, bandwidth and NVLink: the maker's data sheet (2024). sustained: 1,822 of 2,450 TFLOP/s by mamf-finder of
stas00/ml-engineering (compute/accelerator). memory_mib: nvidia-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

GB200_186 = Gpu(
    name="GB200-186",
    bf16_tflops=2450,
    fp8_tflops=4900,
    fp4_tflops=9800,
    sustained=0.744,
    hbm_tbps=8.0,
    memory_mib=189_471,
    nvlink_gbps=900,
    nvlink_domain=72,
)
