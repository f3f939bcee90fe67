"""The known GPUs by the name that `[cluster] gpu` uses: the kind, a dash, and the size that its maker prints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

from phalanx.core.errors import PhalanxError
from phalanx.planner.gpus.a100 import A100_40, A100_80
from phalanx.planner.gpus.b200 import B200_192
from phalanx.planner.gpus.b300 import B300_288
from phalanx.planner.gpus.gb200 import GB200_186
from phalanx.planner.gpus.gb300 import GB300_279
from phalanx.planner.gpus.h100 import H100_80
from phalanx.planner.gpus.h200 import H200_141
from phalanx.planner.gpus.h800 import H800_80
from phalanx.planner.gpus.kind import Gpu
from phalanx.planner.gpus.mi250x import MI250X_64
from phalanx.planner.gpus.mi300x import MI300X_192

_KINDS = (A100_40, A100_80, H100_80, H200_141, H800_80, B200_192, B300_288, GB200_186, GB300_279, MI250X_64, MI300X_192)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _KINDS})


def find_gpu(name: str, where: str = "cluster.gpu", remedy: str = "give its memory by cluster.gpu_memory_gib") -> Gpu:
    """The GPU of a name: `H100-80`, `h100`, or as makers write it, `H100-SXM-80GB`; a kind alone is its largest one.

    Raises PhalanxError for a kind that is not known, with the known ones. where: what gave the name, and remedy: what
    helps there, for that error.
    """
    known = {kind.lower(): gpu for kind, gpu in GPUS.items()}
    largest = {gpu.name.split("-")[0].lower(): gpu for gpu in sorted(_KINDS, key=lambda each: each.memory_mib)}
    short = re.sub(r"[-_ ](sxm\d?|oam|nvl\d*)\b", "", name.strip().lower())
    short = re.sub(r"(\d)\s*gi?b$", r"\1", short)
    found = known.get(short) or largest.get(short)
    if found is None:
        # Another first letter is another family of GPUs (V100, H100), not a slip.
        family = [each for each in known if each[:1] == short[:1]]
        close = difflib.get_close_matches(name.lower(), family, n=1, cutoff=0.5)
        nearest = f"did you mean {known[close[0]].name}? Else " if close else ""
        raise PhalanxError(
            where,
            value=name,
            expected=f"one of {', '.join(GPUS)}",
            remedy=f"{nearest}{remedy}",
        )
    return found


def gpu_memory_bytes(name: str) -> int:
    """Bytes of one GPU. Raises PhalanxError for a kind that is not in the table."""
    return find_gpu(name).memory_bytes
