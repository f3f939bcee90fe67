"""The device that torchtitan's modules take by its name when they are imported: import this before any of them.

On CPUs torchtitan takes "cuda", since torch has no accelerator there. Then it is told the device, and what of one it
asks for that CPUs don't have.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._inductor.compile_fx  # looks for triton, which must not be there yet
import torch._utils

NAME = sys.argv[4] if len(sys.argv) > 4 else "cpu"


class _CpuModule(SimpleNamespace):
    """torch.cpu with what torchtitan asks torch.cuda for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _take_cpu() -> None:
    cpu = _CpuModule(
        current_device=lambda: 0,
        get_device_name=lambda _device: "cpu",
        get_device_properties=lambda _device: SimpleNamespace(total_memory=1),
        memory_stats=lambda _device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _device_type: cpu


class _Type:
    """Any type of triton's, made of any others."""

    def __init__(self, *_: Any) -> None:
        pass


class _TritonLanguage(ModuleType):
    """Any name of it is a type, as kernels ask where they are defined."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Type


def _untouched(kernel: Any = None, **_: Any) -> Any:
    """What triton.jit stands for, with arguments of its own and without."""
    return kernel if kernel is not None else lambda given: given


@contextmanager
def _triton() -> Iterator[None]:
    """Its mixture of experts imports triton, which torch for CPUs comes without; nothing here runs it."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    if importlib.util.find_spec("torchao") is not None:
        importlib.import_module("torchao.float8")  # looks for triton as well
    triton, language = ModuleType("triton"), _TritonLanguage("triton.language")
    triton.jit, triton.language = _untouched, language  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
    yield
    del sys.modules["triton"], sys.modules["triton.language"]


if NAME == "cpu":
    _take_cpu()
with _triton():
    importlib.import_module("torchtitan.components.quantization")
