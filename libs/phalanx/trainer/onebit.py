"""Momenta between replicas as signs (1-bit Adam, Tang et al. 2021, arXiv 2102.02888, algorithm 1).

For some updates Adam runs as ever. From then on the second moment stays as it is, and what replicas tell each other is
not the gradient but the first moment that each has made of its own: one bit an element, and a scale for each block of
`BLOCK`. The mean of all is taken by parts: replica r is the server of part r, averages what all sent of it, and sends
it to all, again as signs. Worker and server each add what their signs left out to what they send next.

A block's scale is the mean of its magnitudes (Karimireddy et al. 2019, arXiv 1901.09847: the nearest multiple of the
signs, which is what error feedback needs), in bfloat16. No block reaches over two tensors, and in a matrix whose rows
are a multiple of `BLOCK` none over two rows: the row of a rare token has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.box import HeldTensor
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job
from phalanx.trainer.optimizer import Optimizer, clip_factor

BLOCK, BITS = 64, 8
NUM_FROZEN = "num_variance_updates"


def pack(values: Tensor, counts: Tensor) -> Tensor:
    """fp32 [..., n], n a multiple of `BLOCK` -> uint8 [..., n / 8 + 2 n / BLOCK]: a bit for each sign (1: not negative;
    the first element is the lowest bit), then the scales of the blocks as bfloat16.

    counts: fp32 [..., n / BLOCK], elements of each block by which its magnitudes are divided; the others are 0.
    """
    scales = (values.view(*values.shape[:-1], -1, BLOCK).abs().sum(-1) / counts).bfloat16()
    weights = torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.uint8, device=values.device)
    bits = (values >= 0).view(*values.shape[:-1], -1, BITS).to(torch.uint8)
    signs = bits.mul_(weights).sum(-1, dtype=torch.uint8)
    return torch.cat([signs, scales.view(torch.uint8)], -1)


def unpack(packed: Tensor, num_values: int) -> Tensor:
    """What `pack` says of num_values (a multiple of `BLOCK`) elements: fp32 [..., num_values], each its block's scale
    with its sign.
    """
    num_signs = num_values // BITS
    signs, scales = packed[..., :num_signs], packed[..., num_signs:].contiguous().view(torch.bfloat16)
    shifts = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    bits = (signs[..., None] >> shifts).bitwise_and_(1).flatten(-2)
    blocks = (bits.float() * 2 - 1).view(*scales.shape, BLOCK)
    return blocks.mul_(scales.float()[..., None]).flatten(-2)


class SignMean:
    """The mean over replicas of some tensors, by signs both ways, with the errors of both. sizes: elements of each."""

    def __init__(self, link: ReplicaLink, sizes: Sequence[int], device: torch.device) -> None:
        self._link, self._sizes = link, list(sizes)
        self._padded = [-(-size // BLOCK) * BLOCK for size in sizes]
        self._part = -(-sum(self._padded) // (link.size * BLOCK)) * BLOCK
        self._is_real = self._laid_out([torch.ones(size, device=device) for size in sizes])
        self._counts = self._is_real.view(link.size, -1, BLOCK).sum(-1).clamp_min(1.0)
        self.worker_error = torch.zeros(link.size, self._part, device=device)
        self.server_error = torch.zeros(self._part, device=device)

    def _laid_out(self, tensors: Sequence[Tensor]) -> Tensor:
        """One part for each replica, [R, part]: the tensors one after another, each filled up with zeros to blocks."""
        filled = [
            F.pad(each.reshape(-1), (0, size - each.numel())) for each, size in zip(tensors, self._padded, strict=True)
        ]
        whole = self._link.size * self._part
        return torch.cat([*filled, filled[0].new_zeros(whole - sum(self._padded))]).view(self._link.size, self._part)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the mean as all replicas see it, in place, the same bits on each."""
        sent = self._laid_out(tensors).add_(self.worker_error)
        packed = pack(sent, self._counts)
        self.worker_error = (sent - unpack(packed, self._part)).mul_(self._is_real)
        mine = unpack(self._link.all_to_all(packed), self._part).mean(0).mul_(self._is_real[self._link.rank])
        mine.add_(self.server_error)
        packed = pack(mine, self._counts[self._link.rank])
        self.server_error = (mine - unpack(packed, self._part)).mul_(self._is_real[self._link.rank])
        whole = unpack(self._link.all_gather(packed), self._part).flatten()[: sum(self._padded)]
        for tensor, found in zip(tensors, torch.split(whole, self._padded), strict=True):
            tensor.copy_(found[: tensor.numel()].view_as(tensor))


class OneBitAdam(Optimizer):
    """AdamW whose first moment replicas average by signs, once its second moment has stood for `warmup_steps` updates.

    The momentum that is saved is the average, the same in all replicas; the errors start anew with the process. An
    element whose second moment is 0 when that is frozen (nothing has reached it) stays as it is, but for weight decay:
    any step would be one by 1 / eps.
    """

    def __init__(self, job: Job, parameters: Sequence[HeldTensor], link: ReplicaLink) -> None:
        super().__init__(job, parameters)
        self._settings, self._link = job.optimizer, link
        self._warmup = job.gradient_compression.warmup_steps
        self.num_variance_updates = 0
        self._trained = [i for i, param in enumerate(self._params) if param.numel()]
        self._mean: SignMean | None = None

    def counters(self) -> dict[str, int | float]:
        """Also how many updates the second moment has seen."""
        return {**super().counters(), NUM_FROZEN: self.num_variance_updates}

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """As `Optimizer.resume`; the second moment of a run that never froze it has seen every update."""
        super().resume(counters)
        self.num_variance_updates = int(counters.get(NUM_FROZEN, self.num_updates))

    @property
    def is_frozen(self) -> bool:
        """Whether the next update is one of signs."""
        return self.num_updates >= self._warmup

    def update(self, gradients: Sequence[Tensor | None], gradient_norm: float, lr_factor: float) -> None:
        """During warm-up of the summed gradients; then of this replica's own, scaled so that their mean is the batch's
        gradient, and clipped by their own norm.
        """
        if not self.is_frozen:
            super().update(gradients, gradient_norm, lr_factor)
            self.num_variance_updates += 1
            return
        scale = clip_factor(gradient_norm, self._max_norm)
        self._update_by_signs(gradients, scale, self._peak_lr * lr_factor)
        self.num_updates += 1

    @torch.no_grad()
    def _update_by_signs(self, gradients: Sequence[Tensor | None], scale: float, lr: float) -> None:
        trained = [i for i in self._trained if gradients[i] is not None]
        momenta = [self._state[i]["exp_avg"] for i in trained]
        variances = [self._state[i]["exp_avg_sq"] for i in trained]
        given = [gradient for i in trained if (gradient := gradients[i]) is not None]
        beta1, beta2 = self._settings.beta1, self._settings.beta2
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, given, alpha=(1 - beta1) * scale)
        if self._link.group is not None and trained:
            if self._mean is None:
                self._mean = SignMean(self._link, [each.numel() for each in momenta], momenta[0].device)
            self._mean.average(momenta)
        torch._foreach_mul_(momenta, [(variance > 0).float() for variance in variances])
        first = 1 - beta1 ** (self.num_updates + 1)
        second = 1 - beta2**self.num_variance_updates if self.num_variance_updates else 1.0
        decays = {id(p): group["weight_decay"] for group in self._optimizer.param_groups for p in group["params"]}
        for i, momentum, variance in zip(trained, momenta, variances, strict=True):
            param = self._params[i]
            param.mul_(1 - lr * decays[id(param)])
            param.addcdiv_(momentum, (variance / second).sqrt_().add_(self._settings.eps), value=-lr / first)
            self._state[i]["step"] += 1
