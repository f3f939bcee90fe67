"""The collectives over `dp_replicate` that the trainer itself calls, each byte that is handed to them counted.

Replicas may lie behind slow links, so what goes over them is worth a number. A call counts the bytes of this rank's
buffer, as it is given to torch.distributed: what an algorithm of the backend then sends (a ring all-reduce of n ranks:
2 (n - 1) / n of it) does not depend on what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 << 20


class ReplicaLink:
    """This rank and those that hold the same part of the model in the other replicas. group: None for one replica,
    where nothing is exchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.sent_bytes = 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the replicas, in place; bit for bit the same on all of them."""
        if self.group is not None and tensor.numel():
            self.sent_bytes += tensor.numel() * tensor.element_size()
            dist.all_reduce(tensor, group=self.group)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Mean over the replicas of each tensor (all of one type), in place, in buckets of `BUCKET_BYTES`."""
        if self.group is None:
            return
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self.all_reduce(flat)
            flat /= self.size
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, as many at a time as `BUCKET_BYTES` hold, at least one; empty ones are left out."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and num_bytes + size > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        if size:
            bucket.append(tensor)
            num_bytes += size
    if bucket:
        yield bucket
