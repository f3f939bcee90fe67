"""Measuring between ranks that torchrun started, on as many hosts as it likes: each goes through the plan, and rank 0
gets all times through the ranks' store.

Nobody watches from outside, so a rank that hangs ends itself, as one that trains under torchrun does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.fabric.plan import Plan
from phalanx.fabric.rank import run_rank
from phalanx.fabric.report import Report, report_of
from phalanx.gang import Event, torchrun_context
from phalanx.trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def launched_world(environ: Mapping[str, str]) -> int | None:
    """How many ranks torchrun has started, of which this process is one; None where it has not."""
    return int(environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ else None


def measure_launched(plan: Plan, on_phase: Callable[[str], None]) -> Report | None:
    """Measures as one of torchrun's ranks; the report on rank 0, None on the others. NCCL is left its own choice of
    algorithm, and no other processes repeat what was slow.

    Raises PhalanxError for what this host lacks, and what torch raises where another rank is gone.
    """
    rank = int(os.environ["RANK"])
    told: list[tuple[str, dict[str, Any]]] = []
    gathered: list[Event] = []

    def report(kind: str, /, **fields: Any) -> None:
        watchdog.report(kind, **fields)
        if kind in ("measured", "pair"):
            told.append((kind, fields))
        elif kind == "phase" and rank == 0:
            on_phase(fields["name"])

    def gather(store: Store) -> None:
        store.set(_key(rank), json.dumps(told))
        for other in range(plan.world_size if rank == 0 else 0):
            gathered.extend(Event(other, kind, fields, 0.0) for kind, fields in json.loads(store.get(_key(other))))

    with Watchdog(rank) as watchdog:
        run_rank(torchrun_context(plan.to_json(), report), gather)
    return report_of(plan, gathered) if rank == 0 else None


def _key(rank: int) -> str:
    return f"fabric/{rank}"
