"""Local updates: replicas that train by themselves for H steps, then meet (DiLoCo, Douillard et al. 2023, arXiv
2311.08105, algorithm 1).

Inside a round each replica takes H steps of the job's optimizer on its own windows. Then the differences between what
all began with and where each came to are averaged over the replicas, as one gradient of an outer SGD with Nesterov
momentum, whose step from the common beginning is where the next round begins. The moments of the inner optimizer are
averaged as well, so that all replicas are one at the end of a round: whatever is saved there has the shape of any other
run's, and any layout goes on with it, one with another number of replicas too.

A replica's gradient is that of its part of the batch's loss, times the number of replicas: their mean is the gradient
of the batch, whatever share of its tokens each has read. Each replica clips by the norm of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.core.box import HeldTensor
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job
from phalanx.trainer.optimizer import Optimizer

OUTER_MOMENT, NUM_ROUNDS = "outer_momentum", "num_rounds"


class LocalUpdates(Optimizer):
    """The job's optimizer inside a round, and the outer one at its end. Its state holds the outer momentum beside the
    moments; what a round began with is in no checkpoint, as there it equals the parameters.
    """

    def __init__(self, job: Job, parameters: Sequence[HeldTensor], link: ReplicaLink) -> None:
        super().__init__(job, parameters)
        self.moments = (*self.moments, OUTER_MOMENT)
        self._settings, self._link = job.local_updates, link
        for param, state in zip(self._params, self._state, strict=True):
            state[OUTER_MOMENT] = torch.zeros_like(param, requires_grad=False)
        self._began: list[Tensor] | None = None
        self.num_rounds = 0

    def counters(self) -> dict[str, int | float]:
        """Also the rounds that have ended."""
        return {**super().counters(), NUM_ROUNDS: self.num_rounds}

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """As `Optimizer.resume`, at the begin of a round; a run that trained otherwise before had none."""
        super().resume(counters)
        self.num_rounds = int(counters.get(NUM_ROUNDS, 0))

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], gradient_norm: float, lr_factor: float) -> None:
        """An inner step of this replica alone; the first of a round keeps what it begins with."""
        self.begin_round()
        super().update(gradients, gradient_norm, lr_factor)

    @torch.no_grad()
    def begin_round(self) -> None:
        """Keeps the parameters, unless a round has begun already. All replicas hold the same ones."""
        if self._began is None:
            self._began = [param.detach().clone() for param in self._params]

    @torch.no_grad()
    def end_round(self) -> None:
        """Brings all replicas to one place, by one outer step; all of them call it after the same inner step. The
        learning-rate schedule is the inner optimizer's.
        """
        self.begin_round()
        began = self._began
        assert began is not None, "begin_round has just kept them"
        held = [i for i, param in enumerate(self._params) if param.numel()]
        params = [self._params[i].detach() for i in held]
        references = [began[i] for i in held]
        momenta = [self._state[i][OUTER_MOMENT] for i in held]
        if held:
            torch._foreach_sub_(params, references)
            torch._foreach_neg_(params)
            self._link.mean(params)  # from here on the outer gradient
            lr, momentum = self._settings.outer_lr, self._settings.outer_momentum
            nesterov_step(references, params, momenta, lr=lr, momentum=momentum)
            torch._foreach_copy_(params, references)
            for moment in self.moments[:-1]:
                self._link.mean([self._state[i][moment] for i in held])
        self._began = None
        self.num_rounds += 1


def nesterov_step(
    params: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], *, lr: float, momentum: float
) -> None:
    """One step of SGD with Nesterov momentum as torch.optim.SGD takes it (nesterov=True, no dampening), in place:
    b = momentum b + g; p -= lr (g + momentum b).
    """
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(params, gradients, alpha=-lr)
    torch._foreach_add_(params, momenta, alpha=-lr * momentum)
