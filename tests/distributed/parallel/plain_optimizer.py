"""The optimizer of a job over the whole decoder of one process: torch's own AdamW, and Muon's update of its matrices as
its paper writes it down.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.models.decoder import Decoder
from phalanx.spec import Job
from phalanx.trainer.muon import orthogonal


class PlainOptimizer:
    """Decays what `[optimizer] decayed` names, by the names and dimensions of the decoder's parameters."""

    def __init__(self, decoder: Decoder, job: Job) -> None:
        self.settings = job.optimizer
        trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
        is_muon = job.optimizer.name == "muon"
        self.momenta: list[tuple[torch.nn.Parameter, Tensor]] = [
            (p, torch.zeros_like(p)) for name, p in trained.items() if is_muon and _is_hidden(name, p)
        ]
        rest = {name: p for name, p in trained.items() if not (is_muon and _is_hidden(name, p))}
        decayed = {
            "matrices": lambda name: rest[name].dim() > 1,
            "hidden": lambda name: rest[name].dim() > 1 and name.startswith("layers."),
            "all": lambda name: True,
        }[job.optimizer.decayed]
        groups = [
            {"params": [p for name, p in rest.items() if decayed(name)], "weight_decay": self.settings.weight_decay},
            {"params": [p for name, p in rest.items() if not decayed(name)], "weight_decay": 0.0},
        ]
        betas = (self.settings.beta1, self.settings.beta2)
        self.adamw = torch.optim.AdamW(groups, self.settings.lr, betas, self.settings.eps, foreach=False, fused=False)

    @torch.no_grad()
    def step(self) -> None:
        """One update by the gradients that the parameters have."""
        self.adamw.step()
        lr, momentum = self.settings.lr, self.settings.momentum
        for parameter, moment in self.momenta:
            gradient = parameter.grad
            assert gradient is not None, "it trains"
            moment.mul_(momentum).add_(gradient, alpha=1 - momentum)
            update = orthogonal((1 - momentum) * gradient + momentum * moment, self.settings.ns_steps, torch.float32)
            parameter.mul_(1 - lr * self.settings.weight_decay)
            parameter.sub_(lr * 0.2 * math.sqrt(max(parameter.shape)) * update)


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers.") and parameter.dim() == 2
