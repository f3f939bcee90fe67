"""What the ranks of the tests of `phalanx doctor` do beside measuring."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from support.ethernet import Namespaces, port_name

from phalanx.fabric import rank
from phalanx.fabric.operations import exchange, prepared, ring_all_reduce, tree_all_reduce
from phalanx.fabric.plan import BY_HAND, OPERATIONS
from phalanx.gang import RankContext, init_process_group


def all_reduce_by_hand(context: RankContext) -> None:
    """Ring and tree beside the backend's own all-reduce, and a message to the one before."""
    init_process_group(context, 30.0)
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(context.rank)
    errors = {}
    for name, all_reduce in (("ring", ring_all_reduce), ("tree", tree_all_reduce)):
        for num_elements in (context.world_size, 24 * context.world_size):
            mine = torch.randn(num_elements, dtype=torch.float64)
            expected = mine.clone()
            dist.all_reduce(expected)
            all_reduce(mine, world)
            errors[f"{name} {num_elements}"] = (mine - expected).abs().max().item()
    received = torch.empty(1)
    exchange(torch.tensor([float(context.rank)]), received, context.world_size - 1, world)
    for operation in (*OPERATIONS, *BY_HAND):
        prepared(operation, 100, world, torch.device("cpu"))()
    context.report("result", errors=errors, received=received.item())
    dist.destroy_process_group()


def measure_and_hang(context: RankContext) -> None:
    """Rank 1 stops for good between two measurements."""
    _after_measurements(context, 3, threading.Event().wait)


def measure_and_raise(context: RankContext) -> None:
    """Rank 1 raises between two measurements."""

    def fail() -> None:
        raise RuntimeError("the adapter is on fire")

    _after_measurements(context, 3, fail)


def _after_measurements(context: RankContext, number: int, then: Any) -> None:
    told = 0

    def report(kind: str, /, **fields: Any) -> None:
        nonlocal told
        context.report(kind, **fields)
        told += kind == "measured"
        if context.rank == 1 and told == number:
            then()

    rank.run_rank(RankContext(**{name: getattr(context, name) for name in _FIELDS}, report=report))


_FIELDS = [name for name in RankContext.__slots__ if name != "report"]


def measure_behind_switch(context: RankContext) -> None:
    """Each rank in a network namespace of its own."""
    Namespaces.from_environ().enter(context.rank)
    os.environ["GLOO_SOCKET_IFNAME"] = port_name(context.rank)
    rank.run_rank(context)
