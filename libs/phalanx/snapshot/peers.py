"""How the ranks that restore together hand bytes to each other: raw bytes over a gloo group of their own, on CPU
whatever the ranks train on, with a deadline on every wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from phalanx.core.errors import OutsideError
from phalanx.snapshot.gloo import gloo_group

RANKS_A_GROUP = 128


class Peers(Protocol):
    """A group of ranks. rank: this one's number in it."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by number. All call it together. Raises OutsideError past the deadline."""
        ...

    def swap(self, outgoing: Mapping[int, np.ndarray], incoming: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Hands `outgoing` (uint8 [n]) to the ranks named, and takes as many bytes as `incoming` says from the ranks
        named there. The others know of it: both sides compute it from the same plan. Raises OutsideError.
        """
        ...


class GlooPeers:
    """This rank's group: the ranks from a multiple of `group_size` on; all of them make it together."""

    def __init__(self, deadline_s: float, group_size: int = RANKS_A_GROUP) -> None:
        first = dist.get_rank() // group_size * group_size
        self._members = list(range(first, min(first + group_size, dist.get_world_size())))
        self._timeout = timedelta(seconds=deadline_s)
        self._group = gloo_group(self._members, deadline_s)
        self.rank, self.size = dist.get_rank() - first, len(self._members)

    def gather(self, data: bytes) -> list[bytes]:
        """See `Peers.gather`."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        try:
            dist.all_reduce(sizes, group=self._group)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(data)] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
            found = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded, group=self._group)
        except RuntimeError as error:
            raise OutsideError("a rank of those that restore together is gone or late") from error
        return [rows[:size].numpy().tobytes() for rows, size in zip(found, sizes.tolist(), strict=True)]

    def swap(self, outgoing: Mapping[int, np.ndarray], incoming: Mapping[int, int]) -> dict[int, np.ndarray]:
        """See `Peers.swap`."""
        found = {member: torch.empty(size, dtype=torch.uint8) for member, size in incoming.items()}
        given = {member: torch.from_numpy(data) for member, data in outgoing.items()}
        late = self.rank
        try:
            works = [(at, dist.irecv(found[at], group=self._group, group_src=at)) for at in sorted(found)]
            works += [(at, dist.isend(given[at], group=self._group, group_dst=at)) for at in sorted(given)]
            for late, work in works:  # noqa: B007 - named where it fails
                assert work is not None
                work.wait(self._timeout)
        except RuntimeError as error:
            whom = f"rank {self._members[late]}"
            raise OutsideError(f"{whom} is gone or late while a checkpoint is restored together") from error
        return {member: rows.numpy() for member, rows in found.items()}

    def close(self) -> None:
        """Ends the group; its ranks need not do so together."""
        dist.destroy_process_group(self._group)
