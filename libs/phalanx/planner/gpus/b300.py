"""NVIDIA B300, 288 GB, in boards of eight.

Peaks, bandwidth and NVLink: the maker's data sheet (2025), but fp4_tflops: the B200's, as with the GB300. sustained:
1,769 of 2,250 TFLOP/s by mamf-finder of stas00/ml-engineering (compute/accelerator). memory_mib: the printed size less
the share that a B200's driver keeps.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

B300_288 = Gpu(
    name="B300-288",
    bf16_tflops=2250,
    fp8_tflops=4500,
    fp4_tflops=9000,
    sustained=0.786,
    hbm_tbps=8.0,
    memory_mib=275_040,
    nvlink_gbps=900,
    nvlink_domain=8,
)
