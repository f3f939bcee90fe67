"""The few numbers of the time model that no data sheet prints: fitted on published step times, the same for every GPU,
model and layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares are of the printed bandwidth or of the products' sustained rate, 0 to 1.

    memory_share: of the memory's bandwidth that element-wise kernels reach. nvlink_share, network_share: of the links'
    rate that collectives reach. flash_forward, flash_backward: of the sustained bf16 rate that fused attention reaches
    with its newest kernels; flash_older: of that, with kernels of a generation before. fp8_share, fp4_share: of
    sustained x printed peak in narrow formats. eager: bytes of element-wise operations where nothing fuses them, over
    those where a compiler or hand-made kernels do. exposed_*: of traffic that overlaps with computation, what is seen
    nevertheless, for data, tensor (context too) and pipeline parallelism. layer_s, routed_s: seconds of the host to
    launch one layer's forward, dense or of experts, and to wait for the counts of tokens that these need; seen where
    the GPU is faster; backward takes half as much again. step_s: seconds of a step outside of all that is counted.
    doubling: relative slowdown for each doubling of the number of nodes (the slowest of many).
    """

    memory_share: float = 0.789
    nvlink_share: float = 0.69
    network_share: float = 0.764
    flash_forward: float = 0.684
    flash_backward: float = 0.53
    flash_older: float = 0.542
    fp8_share: float = 0.894
    fp4_share: float = 0.772
    eager: float = 1.68
    exposed_data: float = 0.179
    exposed_tensor: float = 0.583
    exposed_pipeline: float = 0.254
    layer_s: float = 0.0002
    routed_s: float = 0.00557
    step_s: float = 0.0209
    doubling: float = 0.00369


CALIBRATION = Calibration()
