"""For tests that need ranks: gangs from one fork server, results by rank."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.order import GangOrder

TEST_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
)


def run_gang(
    fork_server: ForkServer,
    world_size: int,
    entry: str,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `entry` ("module:function") in every rank of a new gang; what each rank gave to `context.report("result",
    ...)`.

    A rank that reports several results gets them merged. Raises AssertionError with the first cause and the end of the
    ranks' logs when the gang fails, and with every rank's stack when it takes longer than `timeout_s`.
    """
    results: list[dict[str, Any]] = [{} for _ in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="phalanx-gang-") as folder:
        order = GangOrder(world_size, entry, Path(folder), arguments or {}, environ or {})
        gang = fork_server.start(order)
        try:
            for event in gang.events(timeout_s):
                if event.kind == "result" and event.rank is not None:
                    results[event.rank].update(event.fields)
            if not gang.over:
                stacks = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in gang.stacks(5.0).items())
                raise AssertionError(f"{entry}: not over after {timeout_s:g} s\n{stacks}")
        finally:
            outcome = gang.end(0.0)
        assert outcome.ok, (
            f"{entry}: {outcome.first_cause}\n{outcome.first_cause and outcome.first_cause.detail}\n{_logs(order)}"
        )
    return results


def _logs(order: GangOrder, num_bytes: int = 2000) -> str:
    texts = {rank: order.log_path(rank) for rank in range(order.world_size)}
    return "\n".join(
        f"--- rank {rank}\n{path.read_text(errors='replace')[-num_bytes:]}"
        for rank, path in texts.items()
        if path.exists()
    )
