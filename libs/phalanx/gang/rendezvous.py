"""How the ranks of a gang find each other: one TCP store on rank 0, keys prefixed by attempt and world size, then a
process group.

The prefix keeps a restarted gang from the addresses and answers that its predecessor left in a store that outlived it
(torchrun's agent store). The world size is in it because torchrun does not count a change of members as a restart.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from phalanx.gang.context import RankContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def open_store(context: RankContext, timeout_s: float) -> Store:
    """The gang's key-value store. Raises torch's DistNetworkError when rank 0 does not answer within `timeout_s`."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(
        context.master_address,
        context.master_port,
        context.world_size,
        is_master=context.rank == 0 and not context.uses_agent_store,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=context.master_listen_fd,
    )
    return PrefixStore(prefix(context), store)


def prefix(context: RankContext) -> str:
    """What stands before every key of the gang."""
    return f"attempt_{context.attempt}_of_{context.world_size}"


def init_process_group(context: RankContext, timeout_s: float, backend: str = "gloo") -> Store:
    """Join the default process group of the gang's `world_size` ranks; the gang's key-value store.

    timeout_s: for the rendezvous and for every later collective. Give more than the longest deadline of a phase:
    a collective that times out ends the whole gang before the rank that hangs can be named.
    """
    import torch.distributed as dist

    store = open_store(context, timeout_s)
    dist.init_process_group(
        backend,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return store
