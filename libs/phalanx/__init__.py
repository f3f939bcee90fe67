"""Phalanx: pre-train large language models on many GPUs and keep the run alive.

The package has two roots in the source tree, `libs/` and `services/`, and one where it is installed.
`phalanx.Client` is the typed client of the services; it needs the extra `phalanx[rpc]` and is imported at first use.
"""

from __future__ import annotations

import os.path
import sys

TYPE_CHECKING = False  # as typing's; all that is imported here delays every command, Ctrl-C's handler included
if TYPE_CHECKING:
    from typing import Any

    from phalanx.client import Client


def _roots() -> list[str]:
    """This package's folder below each entry of sys.path, as pkgutil.extend_path finds them."""
    folders = [os.path.join(entry, __name__) for entry in sys.path]  # noqa: PTH118
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]  # noqa: PTH112


__path__ += [folder for folder in _roots() if folder not in __path__]
__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from importlib import import_module

        return import_module("phalanx.client").Client
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
