"""Phalanx: pre-train large language models on many GPUs and keep the run alive.

The package has two roots in the source tree, `libs/` and `services/`, and one where it is installed.
`phalanx.Client` is the typed client of the services; it needs the extra `phalanx[rpc]` and is imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.client import Client

__path__ = extend_path(__path__, __name__)
__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        return import_module("phalanx.client").Client
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
