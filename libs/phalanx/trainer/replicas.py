"""What the replicas of a run (`parallel.dp_replicate`) tell each other beside what fully_shard does, and when they are
one model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.box import HeldTensor
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job
from phalanx.trainer.local_updates import LocalUpdates
from phalanx.trainer.onebit import OneBitAdam
from phalanx.trainer.optimizer import Optimizer
from phalanx.trainer.powersgd import PowerSgd


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

    def meet(self, step: int, last_step: int, *, applied: bool) -> None:
        """After the update of `step`; applied: false where it was left out."""

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
        scale(gradients, self.link.size)

    def is_one(self, step: int, last_step: int) -> bool:
        """At the end of a round."""
        return step % self._steps == 0 or step == last_step

    def exchange_of(self, step: int, last_step: int) -> str:
        """Parameters and moments, at the end of a round."""
        return "round" if self.is_one(step, last_step) else ""

    def meet(self, step: int, last_step: int, *, applied: bool) -> None:
        """The outer step, where a round ends."""
        if self.is_one(step, last_step):
            self._optimizer.end_round()


class PowerSgdReplicas(Replicas):
    """Replicas whose gradients are summed as products of narrow matrices, behind `warmup` updates as they are."""

    def __init__(
        self, link: ReplicaLink, device: torch.device, optimizer: Optimizer, power: PowerSgd, warmup: int
    ) -> None:
        super().__init__(link, device)
        self._optimizer, self._power, self._warmup = optimizer, power, warmup
        self._kind = ""

    def prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """What stands for the sum over the replicas."""
        self._kind = "gradients" if self._optimizer.num_updates < self._warmup else "powersgd"
        if self._kind == "powersgd":
            self._power.exchange(gradients)
        else:
            self.link.sum([gradient for gradient in gradients if gradient is not None])

    def exchange_of(self, step: int, last_step: int) -> str:
        """As `prepare` chose."""
        return self._kind

    def meet(self, step: int, last_step: int, *, applied: bool) -> None:
        """What was left out is kept for the next step."""
        self._power.settle(applied=applied)


class OneBitReplicas(Replicas):
    """Replicas whose momenta are averaged by signs in the update itself, behind a warm-up with summed gradients."""

    def __init__(self, link: ReplicaLink, device: torch.device, optimizer: OneBitAdam) -> None:
        super().__init__(link, device)
        self._optimizer = optimizer
        self._is_exchanged = True

    def prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """The sum over the replicas, or the replica's own times their number, whose mean it is."""
        self.clips_apart = self._optimizer.is_frozen
        if self.clips_apart:
            scale(gradients, self.link.size)
        else:
            self.link.sum([gradient for gradient in gradients if gradient is not None])

    def exchange_of(self, step: int, last_step: int) -> str:
        """Signs, unless there was no update."""
        if not self.clips_apart:
            return "gradients"
        return "signs" if self._is_exchanged else ""

    def meet(self, step: int, last_step: int, *, applied: bool) -> None:
        """Only an update tells anything."""
        self._is_exchanged = applied


def scale(gradients: Sequence[Tensor | None], factor: int) -> None:
    """Times `factor`, in place."""
    if given := [gradient for gradient in gradients if gradient is not None and gradient.numel()]:
        torch._foreach_mul_(given, float(factor))


def replicas_of(
    job: Job, link: ReplicaLink, device: torch.device, optimizer: Optimizer, held: Sequence[HeldTensor]
) -> Replicas:
    """How the job's replicas go together. held: the rank's parameters."""
    if isinstance(optimizer, LocalUpdates):
        return LocalReplicas(link, device, optimizer, job.local_updates.steps)
    if isinstance(optimizer, OneBitAdam):
        return OneBitReplicas(link, device, optimizer)
    if job.gradient_compression.method == "powersgd":
        settings = job.gradient_compression
        power = PowerSgd(link, held, settings.rank, job.training.seed, settings.compressed)
        return PowerSgdReplicas(link, device, optimizer, power, settings.warmup_steps)
    return Replicas(link, device)
