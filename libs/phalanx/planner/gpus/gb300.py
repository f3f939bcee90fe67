"""NVIDIA GB300, 279 GB, in racks of 72 GPUs (NVL72), at 1,400 W where the GB200 has 1,200.

Peaks, bandwidth and NVLink: the maker's data sheet (2025), but fp4_tflops, of which the sheet's 14,700 has not been
seen in training: published steps gain as much from fp4 as a GB200's. sustained: the GB200's, raised by the ratio of
published step times of equal layouts in fp8 (2026), as no measurement of products alone is known. memory_mib: the
printed size less the share that a GB200's driver keeps.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

GB300_279 = Gpu(
    name="GB300-279",
    bf16_tflops=2450,
    fp8_tflops=4900,
    fp4_tflops=9800,
    sustained=0.88,
    hbm_tbps=8.0,
    memory_mib=284_208,
    nvlink_gbps=900,
    nvlink_domain=72,
)
