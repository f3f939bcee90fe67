"""AdamW over the plain local pieces of the parameters: the optimizer never learns of meshes, so its state has the
parameters' boxes.

Every local piece is fp32 and aliases the model's master storage. A piece may be empty on some ranks; it takes no part
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from phalanx.core.box import HeldTensor
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job

MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_of(job: Job, parameters: Sequence[HeldTensor], link: ReplicaLink, mesh: Mesh | None = None) -> Optimizer:
    """The job's optimizer: AdamW, with its state in memory or on a disk, Muon, one that has the replicas train by
    themselves, or the user's own. mesh: whose ranks call this together; None for one alone. Raises PhalanxError and
    OutsideError where the disk can't be used.
    """
    if job.optimizer.offload != "none":
        from phalanx.trainer.paged_optimizer import PagedOptimizer

        return PagedOptimizer(job, parameters)
    if job.local_updates.steps:
        from phalanx.trainer.local_updates import LocalUpdates

        return LocalUpdates(job, parameters, link)
    if job.gradient_compression.method == "onebit_adam":
        from phalanx.trainer.onebit import OneBitAdam

        return OneBitAdam(job, parameters, link)
    if job.optimizer.class_ is None and job.optimizer.name == "muon":
        from phalanx.trainer.muon import Muon

        return Muon(job, parameters, mesh)
    if job.optimizer.class_ is None:
        return Optimizer(job, parameters)
    from phalanx.trainer.own_optimizer import OwnOptimizer

    return OwnOptimizer(job, parameters)


class Optimizer:
    """One update of all parameters from plain local gradients, clipped by the global norm.

    AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2. What is decayed follows
    from `[optimizer] decayed` and a parameter's name and shape in the whole model, so it is the same in every layout.
    """

    moments: tuple[str, ...] = MOMENTS

    def __init__(self, job: Job, parameters: Sequence[HeldTensor]) -> None:
        settings = job.optimizer
        self._max_norm, self._decayed = job.training.max_norm, settings.decayed
        self._peak_lr = settings.lr
        self.num_updates = 0
        self._held = list(parameters)
        self._params = [torch.nn.Parameter(held.local, requires_grad=True) for held in parameters]
        groups = self._groups(settings.weight_decay)
        self._state = [new_state(param, settings.implementation) for param in self._params]
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups,  # both may be empty: AdamW refuses a list without groups, not one without parameters
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=settings.implementation == "fused",
            foreach=settings.implementation == "foreach",
        )
        self._optimizer.state.update(zip(self._params, self._state, strict=True))

    def _groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """What is decayed, and all else."""
        return [
            {"params": [p for h, p in self._pairs() if self._is_decayed(h)], "weight_decay": weight_decay},
            {"params": [p for h, p in self._pairs() if not self._is_decayed(h)], "weight_decay": 0.0},
        ]

    def _is_decayed(self, held: HeldTensor) -> bool:
        is_matrix = len(held.global_shape) > 1
        return {"matrices": is_matrix, "hidden": is_matrix and is_inside(held.name), "all": True}[self._decayed]

    def _pairs(self) -> list[tuple[HeldTensor, torch.nn.Parameter]]:
        return [(h, p) for h, p in zip(self._held, self._params, strict=True) if p.numel()]

    def update(self, gradients: Sequence[torch.Tensor | None], gradient_norm: float, lr_factor: float) -> None:
        """Applies one step; `gradients` are aligned with the parameters and are scaled in place by min(1, max_norm /
        norm). None leaves its parameter alone: one that doesn't train.
        """
        clip(gradients, gradient_norm, self._max_norm)
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient if param.numel() else None
        for group in self._optimizer.param_groups:
            group["lr"] = self._peak_lr * lr_factor
        self._optimizer.step()
        self.num_updates += 1
        for param in self._params:
            param.grad = None

    def state(self) -> list[HeldTensor]:
        """The moments as held tensors `optim.<parameter>.<moment>`, with the boxes and replicas of their parameters."""
        return [
            replace(held, name=f"optim.{held.name}.{moment}", local=state[moment])
            for held, state in zip(self._held, self._state, strict=True)
            for moment in self.moments
        ]

    def state_names(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Names of the moments of the whole model's parameters, given by name with their shapes."""
        return [f"optim.{name}.{moment}" for name in shapes for moment in self.moments]

    def counters(self) -> dict[str, int | float]:
        """What goes on beside the tensors: what `resume` takes."""
        return {"num_updates": self.num_updates}

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """Continues the bias correction after the moments were restored in place."""
        self.num_updates = int(counters["num_updates"])
        for state in self._state:
            state["step"].fill_(float(self.num_updates))


def is_inside(name: str) -> bool:
    """Whether a parameter belongs to a block of the model, so is neither an embedding nor the head."""
    return name.startswith("layers.")


def clip_factor(gradient_norm: float, max_norm: float) -> float:
    """What clipping multiplies gradients with: min(1, max_norm / norm); with a `max_norm` of 0 always 1."""
    return min(1.0, max_norm / (gradient_norm + 1e-6)) if max_norm > 0 else 1.0


def clip(gradients: Sequence[torch.Tensor | None], gradient_norm: float, max_norm: float) -> None:
    """Scales all gradients in place by min(1, max_norm / norm); with a `max_norm` of 0 never."""
    scale = clip_factor(gradient_norm, max_norm)
    if scale < 1.0 and (given := [each for each in gradients if each is not None and each.numel()]):
        torch._foreach_mul_(given, scale)


def new_state(param: torch.Tensor, implementation: str) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter before its first update; the fused kernel counts on the parameter's device."""
    step = torch.zeros((), device=param.device if implementation == "fused" else "cpu")
    return {"step": step, **{moment: torch.zeros_like(param, requires_grad=False) for moment in MOMENTS}}
