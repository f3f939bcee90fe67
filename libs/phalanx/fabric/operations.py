"""The operations that are measured, on float32 of a given size: the collectives of training by the backend's own
algorithm, and all-reduce made of messages as a ring and as a tree.

Size in bytes, as nccl-tests counts it: of the whole array for all-reduce, of what is gathered, of what is reduced
before it is scattered, of what one rank sends to all, of one message.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.fabric.plan import ELEMENT_BYTES

Call = Callable[[], None]


def prepared(operation: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """What does the operation once, on buffers of its own: `num_bytes`, up to the next that the group's ranks can
    share. All ranks of the group call it together.
    """
    num_ranks = group.size()
    per_rank = -(-num_bytes // (ELEMENT_BYTES * num_ranks))
    whole = torch.zeros(per_rank * num_ranks, device=device)
    part = torch.zeros(per_rank, device=device)
    match operation:
        case "all_reduce":
            return lambda: _done(dist.all_reduce(whole, group=group))
        case "all_gather":
            return lambda: _done(dist.all_gather_single(whole, part, group=group))
        case "reduce_scatter":
            return lambda: _done(dist.reduce_scatter_single(part, whole, group=group))
        case "all_to_all":
            received = torch.empty_like(whole)
            return lambda: _done(dist.all_to_all_single(received, whole, group=group))
        case "send_recv":
            received = torch.empty_like(whole)
            return lambda: exchange(whole, received, 1, group)
        case "all_reduce_ring":
            return lambda: ring_all_reduce(whole, group)
        case "all_reduce_tree":
            return lambda: tree_all_reduce(whole, group)
    raise AssertionError(operation)


def _done(work: object) -> None:
    """A call that waited has given no work to wait for."""
    assert work is None


def exchange(sent: Tensor, received: Tensor, distance: int, group: dist.ProcessGroup) -> None:
    """Each rank of the group sends to the one `distance` after it and receives from the one as far before it."""
    rank, num_ranks = group.rank(), group.size()
    to = dist.get_global_rank(group, (rank + distance) % num_ranks)
    source = dist.get_global_rank(group, (rank - distance) % num_ranks)
    messages = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a vector [n x k] in place over n ranks in 2 (n - 1) steps of k elements to the next rank: reduce-scatter,
    then all-gather (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
    """
    rank, num_ranks = group.rank(), group.size()
    parts = tensor.view(num_ranks, -1)
    received = torch.empty_like(parts[0])
    for step in range(num_ranks - 1):
        exchange(parts[(rank - step) % num_ranks], received, 1, group)
        parts[(rank - step - 1) % num_ranks].add_(received)
    for step in range(num_ranks - 1):
        exchange(parts[(rank + 1 - step) % num_ranks], received, 1, group)
        parts[(rank - step) % num_ranks].copy_(received)


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a vector in place over n ranks by a binomial tree: ceil(log2 n) steps towards rank 0, each of the whole
    vector, and as many back (Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19, 2005).
    """
    rank, num_ranks = group.rank(), group.size()
    received = torch.empty_like(tensor)
    distances = [1 << level for level in range((num_ranks - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            _send(tensor, rank - distance, group)
        elif rank % (2 * distance) == 0 and rank + distance < num_ranks:
            _receive(received, rank + distance, group)
            tensor.add_(received)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            _receive(tensor, rank - distance, group)
        elif rank % (2 * distance) == 0 and rank + distance < num_ranks:
            _send(tensor, rank + distance, group)


def _send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    dist.send(tensor, group=group, group_dst=to)


def _receive(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    dist.recv(tensor, group=group, group_src=source)
