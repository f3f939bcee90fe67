"""Process groups of our own for torch's planning messages: on the CPU, with our deadline, apart from the program's.

A save in the background speaks in a thread of its own while the program goes on with its collectives, and a load may
come meanwhile: on one group their messages would be mixed up.
"""

from __future__ import annotations

import threading
from typing import Literal

import torch.distributed as dist

from phalanx.snapshot.gloo import gloo_group

Purpose = Literal["save", "load"]

_kept: dict[tuple[Purpose, tuple[int, ...], float], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_kept_lock = threading.Lock()


def own_group(purpose: Purpose, base: dist.ProcessGroup | None, deadline_s: float) -> dist.ProcessGroup | None:
    """A gloo group of the ranks of `base` (None: all), made once; None where the program is one process alone.

    All ranks of `base` must call it in the same order. A collective fails after twice `deadline_s`: a rank may wait for
    another's upload and for the commit.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    base = base or dist.group.WORLD
    assert base is not None, "torch.distributed is initialised"
    ranks = dist.get_process_group_ranks(base)
    key = (purpose, tuple(ranks), deadline_s)
    with _kept_lock:
        if key not in _kept or _kept[key][0] is not base:
            _kept[key] = (base, gloo_group(ranks, 2 * deadline_s))
        return _kept[key][1]
