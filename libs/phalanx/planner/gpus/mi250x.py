"""AMD MI250X: one of its two dies (GCD), which programs see as a GPU of its own; a Frontier node has eight.

Peak and bandwidth: half of the maker's data sheet (2021). sustained: not measured here; of the die's 191.5 TFLOP/s
libraries are reported to reach about three quarters. memory_mib: rocm-smi. nvlink_gbps: Infinity Fabric between the
dies of a node, whose slowest pairs have one link of 50 GB/s.
"""

from __future__ import annotations

from phalanx.planner.gpus.kind import Gpu

MI250X_64 = Gpu(
    name="MI250X-64",
    bf16_tflops=191.5,
    fp8_tflops=0,
    fp4_tflops=0,
    sustained=0.75,
    hbm_tbps=1.64,
    memory_mib=65_520,
    nvlink_gbps=100,
    nvlink_domain=8,
)
