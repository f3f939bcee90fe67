"""NVIDIA A100 SXM, 80 and 40 GB.

Peaks, bandwidth and NVLink: the maker's data sheet (2020). sustained: 271 of 312 TFLOP/s by mamf-finder of
stas00/ml-engineering (compute/accelerator). memory_mib: nvidia-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

A100_80 = Gpu(
    name="A100-80",
    bf16_tflops=312,
    fp8_tflops=0,
    fp4_tflops=0,
    sustained=0.87,
    hbm_tbps=2.0,
    memory_mib=81_920,
    nvlink_gbps=300,
    nvlink_domain=8,
)
A100_40 = Gpu(
    name="A100-40",
    bf16_tflops=312,
    fp8_tflops=0,
    fp4_tflops=0,
    sustained=0.87,
    hbm_tbps=1.555,
    memory_mib=40_960,
    nvlink_gbps=300,
    nvlink_domain=8,
)
