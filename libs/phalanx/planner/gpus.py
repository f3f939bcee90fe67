"""Memory of GPUs by the name that `[cluster] gpu` uses: the kind, a dash, and the size that its maker prints."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from phalanx.core.errors import PhalanxError

# MiB that the driver reports, before any context takes its part.
_MEMORY_MIB: Mapping[str, int] = MappingProxyType(
    {
        "A100-40": 40_960,
        "A100-80": 81_920,
        "H100-80": 81_559,
        "H200-141": 143_771,
        "B200-192": 183_359,
        "MI300X-192": 196_592,
    }
)


def gpu_memory_bytes(name: str) -> int:
    """Bytes of one GPU. Raises PhalanxError for a kind that is not in the table."""
    known = {kind.lower(): kind for kind in _MEMORY_MIB}
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        nearest = f"did you mean {known[close[0]]}? Else " if close else ""
        raise PhalanxError(
            "cluster.gpu",
            value=name,
            expected=f"one of {', '.join(_MEMORY_MIB)}",
            remedy=f"{nearest}give its memory by cluster.gpu_memory_gib",
        )
    return _MEMORY_MIB[known[name.lower()]] * 2**20
