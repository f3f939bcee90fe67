"""NVIDIA H800 SXM, 80 GB: an H100 with NVLink cut to 400 GB/s both ways.

Peaks and bandwidth: as the H100. nvlink_gbps: DeepSeek-V3 hardware paper (arXiv 2505.09343, section 4.1); of the 200
about 160 are reached. sustained: the H100's. memory_mib: nvidia-smi.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

H800_80 = Gpu(
    name="H800-80",
    bf16_tflops=989,
    fp8_tflops=1979,
    fp4_tflops=0,
    sustained=0.80,
    hbm_tbps=3.35,
    memory_mib=81_559,
    nvlink_gbps=200,
    nvlink_domain=8,
)
