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

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """tensor: [n, ...], a part for each replica; [n, ...] of what each replica has for this one."""
        if self.group is None:
            return tensor
        self.sent_bytes += tensor.numel() * tensor.element_size()
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received

    def all_gather(self, tensor: Tensor) -> Tensor:
        """tensor: [...], alike in shape on all replicas; [n, ...] of all of them."""
        if self.group is None:
            return tensor[None]
        self.sent_bytes += tensor.numel() * tensor.element_size()
        gathered = tensor.new_empty(self.size * tensor.numel())
        dist.all_gather_single(gathered, tensor.reshape(-1), group=self.group)
        return gathered.view(self.size, *tensor.shape)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Mean over the replicas of each tensor (all of one type), in place, in buckets of `BUCKET_BYTES`."""
        self.sum(tensors, 1 / self.size)

    def sum(self, tensors: Sequence[Tensor], factor: float = 1.0) -> None:
        """As `mean`, for the sum times `factor`."""
        if self.group is None:
            return
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self.all_reduce(flat)
            if factor != 1:
                flat *= factor
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
