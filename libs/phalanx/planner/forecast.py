"""A run from its step's time: how long, how often interrupted, how much of it training, what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.planner.cost import RunCost, run_cost
from phalanx.planner.mfu import mfu
from phalanx.planner.prices import Prices
from phalanx.planner.reliability import HOUR_S, Recovery, best_interval_s, expected_ettr, has_rates, rates_for

# Assumed of every cluster, until a run has measured its own; each GPU for itself.
DEVICE_TO_HOST_BYTES_PER_S = 20e9  # PCIe 4 x16 gives 25 at best
STORAGE_BYTES_PER_S = 0.5e9
DETECT_S = 30.0
RESTART_S = 180.0
# A run that keeps less of its wall time never finishes: a day of training would take years.
LEAST_ETTR = 1e-3


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run of some steps comes to.

    mfu: model operations, masked scores left out (docs/mfu.md), by the GPUs' printed bf16 peak. mtbf_h: mean hours
    between interruptions. recovery: with the job's interval. best_interval_s: seconds of training between checkpoints
    that would keep most; ettr, best_ettr: parts of wall time kept with either. cost: None where the kind has no price
    or the run never finishes; unpriced then says why.
    """

    tokens_per_s: float
    mfu: float
    mtbf_h: float
    recovery: Recovery
    ettr: float
    best_interval_s: float
    best_ettr: float
    cost: RunCost | None
    unpriced: str | None = None

    @property
    def finishes(self) -> bool:
        """Whether enough of the time is kept for the run to come to an end."""
        return self.ettr >= LEAST_ETTR


def assumptions(gpu: str) -> list[str]:
    """What a forecast for a kind of GPU takes for granted, each in a line."""
    to_host, to_storage = DEVICE_TO_HOST_BYTES_PER_S / 1e9, STORAGE_BYTES_PER_S / 1e9
    told = [
        f"{to_host:g} GB/s from GPU to host memory, {to_storage:g} GB/s from each GPU to storage and back, "
        f"{DETECT_S:g} s to see a failure, {RESTART_S:g} s for a new gang"
    ]
    if not has_rates(gpu):
        told.append(f"the failure rates of the H100, as none are published for {gpu}")
    return told


def recovery_of(state_bytes: float, interval_s: float) -> Recovery:
    """How a run is taken to save and come back; state_bytes: weights and optimizer state of one GPU."""
    through_storage = state_bytes / STORAGE_BYTES_PER_S
    return Recovery(
        interval_s=interval_s,
        checkpoint_s=state_bytes / DEVICE_TO_HOST_BYTES_PER_S,
        durable_s=through_storage,
        detect_s=DETECT_S,
        restart_s=RESTART_S,
        restore_s=through_storage,
    )


def forecast(
    *,
    gpu: str,
    gpus: int,
    peak_tflops: float,
    step_s: float,
    tokens_per_step: int,
    steps: int,
    flops_per_token: float,
    checkpoint_steps: int,
    state_bytes: float,
    prices: Prices,
) -> Forecast:
    """A run of `steps` steps of `step_s` seconds. checkpoint_steps: between checkpoints; a run that is shorter
    saves at its end. state_bytes: see `recovery_of`."""
    tokens_per_s = tokens_per_step / step_s
    mtbf_h = rates_for(gpu).mtbf_h(gpus)
    recovery = recovery_of(state_bytes, min(checkpoint_steps, steps) * step_s)
    best_s = min(max(step_s, best_interval_s(recovery.checkpoint_s, mtbf_h * HOUR_S)), steps * step_s)
    ettr = expected_ettr(recovery, mtbf_h * HOUR_S)
    best_ettr = expected_ettr(recovery_of(state_bytes, best_s), mtbf_h * HOUR_S)
    cost: RunCost | None = None
    unpriced: str | None = _never(best_ettr)
    if ettr >= LEAST_ETTR:
        try:
            cost, unpriced = run_cost(tokens_per_step * steps, tokens_per_s, gpus, gpu, prices, ettr=ettr), None
        except PhalanxError as error:
            unpriced = str(error)
    return Forecast(
        tokens_per_s=tokens_per_s,
        mfu=mfu(flops_per_token, tokens_per_s, gpus, peak_tflops),
        mtbf_h=mtbf_h,
        recovery=recovery,
        ettr=ettr,
        best_interval_s=best_s,
        best_ettr=best_ettr,
        cost=cost,
        unpriced=unpriced,
    )


def _never(best_ettr: float) -> str:
    """Why a run has no cost whose failures leave no time for training."""
    hope = "save more often" if best_ettr >= LEAST_ETTR else "not even with the best interval between checkpoints"
    return f"never finishes: failures come faster than checkpoints hold; {hope}"
