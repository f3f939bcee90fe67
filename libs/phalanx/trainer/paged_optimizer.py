"""AdamW whose moments lie in pages of a file on a local disk (`phalanx.paging`): the same numbers as in memory, bit for
bit, page by page.

Parameters and gradients stay where they are. On an accelerator the moments of a page are copied there for its update
and back. A checkpoint reads them from the file, a restore fills the file: see `HeldTensor.paged`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

import torch
from torch.optim.adamw import adamw

from phalanx.core.box import HeldTensor
from phalanx.paging.layout import Chunk
from phalanx.paging.state import PagedState
from phalanx.spec import Job
from phalanx.trainer.optimizer import MOMENTS, Optimizer, clip

GIB: Final = 1 << 30


class PagedOptimizer(Optimizer):
    """As `Optimizer`, with its state in `optimizer.offload_folder` and pages in `optimizer.offload_gib` of memory.

    Raises PhalanxError where the folder can't be used; OutsideError where its disk lacks space, or fails in an update.
    """

    moments = MOMENTS

    def __init__(self, job: Job, parameters: Sequence[HeldTensor]) -> None:
        settings = self._settings = job.optimizer
        assert settings.offload_folder is not None, "the job file was checked"
        self._max_norm, self._decayed = job.training.max_norm, settings.decayed
        self._peak_lr = settings.lr
        self.num_updates = 0
        self._held = list(parameters)
        self._params = [torch.nn.Parameter(held.local, requires_grad=False) for held in parameters]
        decays = {
            id(p): group["weight_decay"] for group in self._groups(settings.weight_decay) for p in group["params"]
        }
        self._decays: list[float] = [decays.get(id(param), 0.0) for param in self._params]
        self._flat = [held.local.detach().view(-1) for held in parameters]
        sizes = [flat.numel() for flat in self._flat]
        folder = Path(settings.offload_folder).expanduser().absolute()
        self.pages = PagedState(folder, sizes, len(MOMENTS), int(settings.offload_gib * GIB))

    def update(self, gradients: Sequence[torch.Tensor | None], gradient_norm: float, lr_factor: float) -> None:
        """As `Optimizer.update`. Raises OutsideError where the disk fails: the state is then no longer whole."""
        clip(gradients, gradient_norm, self._max_norm)
        flat = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
        self.num_updates += 1

        def act(chunks: Sequence[Chunk], planes: Sequence[torch.Tensor]) -> None:
            trained = [chunk for chunk in chunks if flat[chunk.tensor] is not None]
            for decay, group in groupby(trained, key=lambda chunk: self._decays[chunk.tensor]):
                self._step(list(group), planes, flat, decay, self._peak_lr * lr_factor)

        self.pages.update(act)

    @torch.no_grad()
    def _step(
        self,
        chunks: Sequence[Chunk],
        planes: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        weight_decay: float,
        lr: float,
    ) -> None:
        """torch's own update of these chunks, with their moments in `planes`."""
        settings = self._settings
        params = [self._flat[chunk.tensor][chunk.start : chunk.stop] for chunk in chunks]
        kept = [[plane[chunk.at : chunk.at + chunk.stop - chunk.start] for chunk in chunks] for plane in planes]
        used = [[each.to(param.device) for each, param in zip(moment, params, strict=True)] for moment in kept]
        is_fused = settings.implementation == "fused"
        done = float(self.num_updates - 1)
        adamw(
            params=params,
            grads=[_part(gradients[chunk.tensor], chunk) for chunk in chunks],
            exp_avgs=used[0],
            exp_avg_sqs=used[1],
            max_exp_avg_sqs=[],
            state_steps=[torch.tensor(done, device=param.device if is_fused else "cpu") for param in params],
            fused=is_fused,
            foreach=settings.implementation == "foreach",
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=settings.eps,
            maximize=False,
        )
        for moment, updated in zip(kept, used, strict=True):
            for target, source in zip(moment, updated, strict=True):
                if source.device != target.device:
                    target.copy_(source)

    def state(self) -> list[HeldTensor]:
        """As `Optimizer.state`; the values lie in the file."""
        return [
            replace(
                held,
                name=f"optim.{held.name}.{moment}",
                local=torch.empty(held.box.shape, device="meta"),
                paged=self.pages.tensor(tensor, number),
            )
            for tensor, held in enumerate(self._held)
            for number, moment in enumerate(MOMENTS)
        ]

    def resume(self, counters: Mapping[str, int | float]) -> None:
        """Continues the bias correction after the moments were restored into the file."""
        self.num_updates = int(counters["num_updates"])


def _part(gradient: torch.Tensor | None, chunk: Chunk) -> torch.Tensor:
    assert gradient is not None, "chunks without a gradient were left out"
    return gradient[chunk.start : chunk.stop]
