"""Models, losses, metrics and optimizers of a user's own, good ones and such that ranks could not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.protocol import Context, Style


class Plain(nn.Module):
    """Has nothing but forward."""

    def __init__(self, vocab_size: int, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(i): nn.Linear(dim, dim) for i in range(4)})
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


class Blockless(nn.Module):
    """Has embedding and head alone."""

    def __init__(self, vocab_size: int, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        return self.head(self.embed(tokens))


class Planned(Plain):
    """Leaves its head out of its plan."""

    def parallel_plan(self) -> Mapping[str, Style]:
        return {"embed": "vocab_embedding", "layers.*": "colwise"}


class Staged(Plain):
    """Loses a layer when it is split."""

    def split_stages(self, num_stages: int) -> Sequence[nn.Module]:
        first, last = nn.Module(), nn.Module()
        first.embed, first.layers = self.embed, nn.ModuleDict({"0": self.layers["0"]})
        last.layers, last.head = nn.ModuleDict({str(i): self.layers[str(i)] for i in (1, 2)}), self.head
        return [first, last]


def raises(*_: Any) -> Tensor:
    raise RuntimeError("no such kernel")


class Sharing(Plain):
    """Looks at no other tokens, so that it needs nothing of a context."""

    def set_context(self, context: Context) -> None:
        pass


class SharingStaged(Sharing):
    """Its stages know nothing of a context."""

    def split_stages(self, num_stages: int) -> Sequence[nn.Module]:
        first, last = nn.Module(), nn.Module()
        first.embed, first.layers = self.embed, nn.ModuleDict({"0": self.layers["0"]})
        last.layers, last.head = nn.ModuleDict({str(i): self.layers[str(i)] for i in (1, 2, 3)}), self.head
        return [first, last]


def cross_entropy(logits: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    """The sum over tokens that count."""
    return scale * F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean, which does not add up."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def counts_all(logits: Tensor, targets: Tensor) -> Tensor:
    """Also tokens that don't count."""
    return logits.square().sum()


def neighbours(logits: Tensor, targets: Tensor) -> Tensor:
    """A sum over windows whose terms look at two tokens each."""
    counted = (targets != -100).unsqueeze(-1)
    return (logits.diff(dim=1).square() * (counted[:, 1:] & counted[:, :-1])).sum()


def a_number(logits: Tensor, targets: Tensor) -> float:
    """No tensor."""
    return 1.0


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """How many tokens are right."""
    return (logits.argmax(-1) == targets).sum().float()


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., arXiv 2302.06675); its momentum is made at the first update."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"], state["count"] = param.grad.clone(), 0
                state["count"] += 1
                update = torch.lerp(param.grad, state["momentum"], group["beta"]).sign()
                state["momentum"] = torch.lerp(param.grad, state["momentum"], group["beta"])  # another tensor each time
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


class ByNorm(torch.optim.Optimizer):
    """Divides by the norm of the whole gradient: not element-wise."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / param.grad.norm())


class ByRows(ByNorm):
    """Remembers a number a row."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["rows"] = param.grad.square().mean(1)


class Learnt(ByNorm):
    """Learns a number for all parameters together."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.param_groups[0]["scale"] = self.param_groups[0].get("scale", 1.0) * 1.1
