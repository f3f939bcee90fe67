"""The numbers of one kind of GPU: at most eight, each with its meaning here and its origin in the kind's own file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. 0 stands for what it cannot do.

    bf16_tflops, fp8_tflops, fp4_tflops: printed peaks of dense products, 10^12 operations a second.
    sustained: share of the bf16 peak that large products reach for hours, at the clocks that the power limit leaves.
    hbm_tbps: printed bandwidth of its memory, 10^12 bytes a second. memory_mib: what the driver reports, before any
    context takes its part. nvlink_gbps: to its neighbours in the fast domain, one way, 10^9 bytes a second.
    nvlink_domain: GPUs that reach each other so.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    sustained: float
    hbm_tbps: float
    memory_mib: int
    nvlink_gbps: float
    nvlink_domain: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        return self.memory_mib * 2**20
