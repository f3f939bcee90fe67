"""Seconds of computation on one GPU: matrix products, attention, element-wise operations.

A product of [m, k] and [k, n] takes its 2 m n k operations at the sustained rate and the bytes of its three matrices at
the memory's bandwidth, one after the other: a roofline without its corner (Williams et al. 2009), which gives the
efficiency curve by size without a further constant, for what a kernel loads before it computes and stores after it is
not hidden. Narrow formats compute faster, move fewer bytes, and pay for conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.core.errors import PhalanxError
from phalanx.planner.calibration import CALIBRATION, Calibration
from phalanx.planner.gpus import Gpu
from phalanx.planner.software import Software


@dataclass(frozen=True, slots=True)
class Precision:
    """Of matrix products. bits: of an element, so which of the GPU's peaks holds. rate: relative to plain products in
    this format. convert_bytes: moved for each element of an input that is made narrow (read, written, written
    transposed, and read once more where its scale is found first)."""

    bits: int
    rate: float = 1.0
    convert_bytes: float = 0.0

    @property
    def element_bytes(self) -> float:
        """Bytes of one element, scales of blocks included."""
        return {16: 2.0, 8: 1.03, 4: 0.57, 32: 4.0}[self.bits]


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16": Precision(16),
        "fp16": Precision(16),
        "fp32": Precision(32),
        # One scale a tensor, known from earlier steps; found from the tensor itself; one a row; one for 32 elements.
        "fp8": Precision(8, convert_bytes=4.0),
        "fp8-current": Precision(8, convert_bytes=6.0),
        "fp8-rowwise": Precision(8, rate=0.55, convert_bytes=6.0),
        "mxfp8": Precision(8, rate=0.92, convert_bytes=4.1),
        "nvfp4": Precision(4, convert_bytes=5.5),
    }
)


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU under one stack: rates in operations and bytes a second, `speed` of the stack included."""

    gpu: Gpu
    software: Software
    precision: Precision
    speed: float = 1.0
    hbm_tbps: float = 0.0
    calibration: Calibration = CALIBRATION

    def product_rate(self, precision: Precision) -> float:
        """Operations a second of large products in a format. Raises PhalanxError where the GPU lacks it."""
        peaks = {16: self.gpu.bf16_tflops, 8: self.gpu.fp8_tflops, 4: self.gpu.fp4_tflops, 32: self.gpu.bf16_tflops / 2}
        shares = {8: self.calibration.fp8_share, 4: self.calibration.fp4_share}
        if not peaks[precision.bits]:
            raise PhalanxError(
                "precision",
                value=f"{precision.bits} bits",
                expected=f"a format that {self.gpu.name} multiplies in",
                remedy="choose bf16",
            )
        share = self.gpu.sustained * shares.get(precision.bits, 1.0)
        return peaks[precision.bits] * 1e12 * share * precision.rate * self.speed

    @property
    def memory_rate(self) -> float:
        """Bytes a second of element-wise kernels."""
        return (self.hbm_tbps or self.gpu.hbm_tbps) * 1e12 * self.calibration.memory_share * self.speed

    def product_s(self, m: float, n: float, k: float, precision: Precision | None = None) -> float:
        """[m, k] times [k, n], written in 2 bytes an element."""
        used = precision or self.precision
        moved = used.element_bytes * (m * k + k * n) + 2 * m * n
        return 2 * m * n * k / self.product_rate(used) + moved / self.memory_rate

    def moved_s(self, num_bytes: float) -> float:
        """Element-wise operations that read and write `num_bytes` in all where they are fused."""
        return num_bytes * (1.0 if self.software.fused else self.calibration.eager) / self.memory_rate

    def attention_s(self, operations: float, scores: float, *, fused: bool) -> tuple[float, float]:
        """Forward and backward of attention.

        operations: of the forward's two products, as far as the mask leaves them (an unfused one computes all; give
        them all). scores: elements of the matrix of scores, which an unfused one writes: 11 bytes each forward (scores,
        softmax, dropout and its mask), 21 backward.
        """
        rate = self.product_rate(PRECISIONS["bf16"])
        if not fused:
            forward = operations / rate + 11 * scores / self.memory_rate
            return forward, 2 * operations / rate + 21 * scores / self.memory_rate
        share = self.calibration.flash_older if self.software.attention == "older" else 1.0
        # Backward computes the scores anew: five products where the forward has two (Dao 2023, arXiv 2307.08691).
        forward = operations / (rate * self.calibration.flash_forward * share)
        return forward, 2.5 * operations / (rate * self.calibration.flash_backward * share)
