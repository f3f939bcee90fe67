"""What the replicas of a run (`parallel.dp_replicate`) tell each other beside what fully_shard does, and when they are
one model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job
from phalanx.trainer.local_updates import LocalUpdates
from phalanx.trainer.optimizer import Optimizer


class Replicas:
    """Replicas that are one at every step, as fully_shard has summed their gradients.

    clips_apart: whether each replica's gradient has a norm of its own, by which it is clipped. total_bytes: what all
    calls of `take_bytes` gave.
    """

    clips_apart = False

    def __init__(self, link: ReplicaLink, device: torch.device) -> None:
        self.link, self._device, self.total_bytes = link, device, 0
        self._totals: dict[str, tuple[int, int]] = {}  # by kind: this rank's bytes, and all ranks'

    def prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """In place, before norms are taken: what the replica's own gradients become."""

    def squares_of(self, square_sum: Tensor) -> Tensor:
        """What this rank adds to the squared norms that are agreed on, [1] or [number of replicas]."""
        if not self.clips_apart:
            return square_sum[None]
        squares = square_sum.new_zeros(self.link.size)
        squares[self.link.rank] = square_sum
        return squares

    def norm_of(self, norms: Sequence[float]) -> float:
        """The one of them that this replica's gradient is clipped by."""
        return norms[self.link.rank if self.clips_apart else 0]

    def is_one(self, step: int, last_step: int) -> bool:
        """Whether all replicas hold one model after `step`: only there it is measured and saved."""
        return True

    def meet(self, step: int, last_step: int) -> None:
        """After the update of `step`, or where it was left out."""

    def exchange_of(self, step: int, last_step: int) -> str:
        """The kind of what is exchanged in `step`, the same on every rank; empty where it is nothing."""
        return ""

    def take_bytes(self, step: int, last_step: int) -> int:
        """Bytes that all ranks of the gang have handed to the collectives over `dp_replicate` in `step`; called by all
        of them, once a step.

        Exchanges of one kind are alike, so what each rank counted is added up over the ranks once for each kind.
        """
        kind, sent = self.exchange_of(step, last_step), self.link.sent_bytes
        self.link.sent_bytes = 0
        if not kind or self.link.group is None:
            return 0
        if kind not in self._totals:
            total = torch.tensor([sent], dtype=torch.int64, device=self._device)
            dist.all_reduce(total)
            self._totals[kind] = sent, int(total)
        counted, total_bytes = self._totals[kind]
        assert sent == counted, (kind, sent, counted)
        self.total_bytes += total_bytes
        return total_bytes


class LocalReplicas(Replicas):
    """Replicas that train by themselves and meet every `steps` steps, and at the last one."""

    clips_apart = True

    def __init__(self, link: ReplicaLink, device: torch.device, optimizer: LocalUpdates, steps: int) -> None:
        super().__init__(link, device)
        self._optimizer, self._steps = optimizer, steps

    def prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """Times the number of replicas, so that their mean is the batch's gradient."""
        if given := [gradient for gradient in gradients if gradient is not None and gradient.numel()]:
            torch._foreach_mul_(given, float(self.link.size))

    def is_one(self, step: int, last_step: int) -> bool:
        """At the end of a round."""
        return step % self._steps == 0 or step == last_step

    def exchange_of(self, step: int, last_step: int) -> str:
        """Parameters and moments, at the end of a round."""
        return "round" if self.is_one(step, last_step) else ""

    def meet(self, step: int, last_step: int) -> None:
        """The outer step, where a round ends."""
        if self.is_one(step, last_step):
            self._optimizer.end_round()


def replicas_of(job: Job, link: ReplicaLink, device: torch.device, optimizer: Optimizer) -> Replicas:
    """How the job's replicas go together."""
    if isinstance(optimizer, LocalUpdates):
        return LocalReplicas(link, device, optimizer, job.local_updates.steps)
    return Replicas(link, device)
