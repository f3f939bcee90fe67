"""Model FLOPs utilisation of a run, by the one formula of docs/mfu.md."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.planner.flops import token_flops
from phalanx.planner.job_search import gpu_of, model_shape
from phalanx.spec.job import Job


def mfu(flops_per_token: float, tokens_per_s: float, gpus: int, peak_tflops: float) -> float:
    """Model operations a second by what the GPUs could do: 0 to 1 (PaLM, arXiv 2204.02311, appendix B).

    flops_per_token: `TokenFlops.model` with `causal=True`. tokens_per_s: of all GPUs together. peak_tflops: of one GPU,
    printed for dense bf16 products, 10^12 operations a second.
    """
    return flops_per_token * tokens_per_s / (gpus * peak_tflops * 1e12)


def mfu_of(job: Job) -> Callable[[float], float] | None:
    """From tokens a second of the whole job to its MFU; None where no peak is known (CPUs, no `cluster.gpu`, memory of
    another card given) or no operations (a class of the user's). Raises PhalanxError for an unknown kind of GPU.
    """
    gpu = gpu_of(job)
    if gpu is None or job.model.class_ is not None:
        return None
    flops_per_token = token_flops(model_shape(job), job.training.seq_len, causal=True).model
    gpus, peak = job.cluster.world_size, gpu.bf16_tflops
    return lambda tokens_per_s: mfu(flops_per_token, tokens_per_s, gpus, peak)
