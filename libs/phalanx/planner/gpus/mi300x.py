"""AMD MI300X, 192 GB.

Peaks, bandwidth and links: the maker's data sheet (2023). sustained: 668 of 1,307 TFLOP/s by mamf-finder of
stas00/ml-engineering (compute/accelerator). memory_mib: rocm-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

MI300X_192 = Gpu(
    name="MI300X-192",
    bf16_tflops=1307,
    fp8_tflops=2614,
    fp4_tflops=0,
    sustained=0.51,
    hbm_tbps=5.3,
    memory_mib=196_592,
    nvlink_gbps=448,
    nvlink_domain=8,
)
