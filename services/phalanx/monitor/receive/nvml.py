"""This machine's GPUs by NVIDIA's driver, where no exporter runs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from phalanx.monitor.rules.gpu import GpuReading


class NoGpu(Exception):
    """There is none to read, in words."""


def read_gpus() -> tuple[GpuReading, ...]:
    """All GPUs of this machine; a figure that a card does not tell is None. Raises NoGpu where there is no driver, no
    library, or no card.
    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise NoGpu("no GPU: nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpu(f"no GPU: {error}") from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        found = tuple(_reading(pynvml, index) for index in range(count))
    except pynvml.NVMLError as error:
        raise NoGpu(f"the driver does not answer: {error}") from error
    finally:
        pynvml.nvmlShutdown()
    if not found:
        raise NoGpu("no GPU: the driver has none")
    return found


def _reading(nvml: Any, index: int) -> GpuReading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def told(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except nvml.NVMLError:  # this card, or this driver, does not tell
            return None

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    use = told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    power_mw = told(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    temperature = told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    clock = told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    ecc = told(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    return GpuReading(
        socket.gethostname(),
        index,
        _text(told(lambda: nvml.nvmlDeviceGetUUID(handle))),
        _text(told(lambda: nvml.nvmlDeviceGetName(handle))),
        utilization=None if use is None else use.gpu / 100,
        memory_used_bytes=None if memory is None else float(memory.used),
        memory_total_bytes=None if memory is None else float(memory.total),
        temperature_c=None if temperature is None else float(temperature),
        power_w=None if power_mw is None else power_mw / 1000,
        sm_clock_mhz=None if clock is None else float(clock),
        ecc_uncorrectable=ecc,
    )


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
