"""Models, losses, metrics and optimizers of a user's own, good ones and such that ranks could not run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.protocol import Context, Initial, Style, split_evenly


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


class Cut(Plain):
    """Takes its plan as an argument."""

    def __init__(self, vocab_size: int, plan: Mapping[str, Style], dim: int = 8) -> None:
        super().__init__(vocab_size, dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.plan = plan

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))

    def parallel_plan(self) -> Mapping[str, Style]:
        return self.plan


class Wanders(Plain):
    """Changes the working folder."""

    def __init__(self, vocab_size: int, folder: str) -> None:
        super().__init__(vocab_size)
        os.chdir(folder)


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


class Fails(Plain):
    """Fails in the method that `where` names."""

    def __init__(self, vocab_size: int, where: str, dim: int = 8) -> None:
        if where == "__init__":
            raise RuntimeError("no such size")
        if where == "exit":
            raise SystemExit(0)
        if where != "super":
            super().__init__(vocab_size, dim)
        self.where = where

    def _given(self, where: str, given: Any) -> Any:
        if self.where == where:
            raise RuntimeError("no such\nshape")
        return given

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Any:
        logits = super().forward(tokens, position_ids, document_ids)
        if self.where == "needs values":
            assert int(tokens.max()) >= 0
        if self.where == "needs a place":
            assert int(os.environ["RANK"]) >= 0
        if self.where == "needs a GPU":
            raise NotImplementedError("no kernel here")
        return {"hidden": logits[0], "tokens": tokens, "pair": (logits, logits)}.get(
            self.where, self._given("forward", logits)
        )

    def initial_weights(self) -> Any:
        made = {name: Initial(std=0.1) for name, _ in self.named_parameters()}
        wrong: dict[str, Any] = {
            "float": made | {"head.weight": 0.1},
            "missing": {"embed.weight": Initial()},
            "nan": made | {"head.weight": Initial(std=float("nan"))},
            "negative": made | {"head.weight": Initial(std=-1.0)},
            "text": made | {"head.weight": Initial(value="x")},  # type: ignore[arg-type]
            "none": None,
        }
        return wrong.get(self.where, self._given("initial_weights", made))

    def parallel_plan(self) -> Any:
        wrong: dict[str, Any] = {"list": ["head"], "no plan": None, "number": {"head": 3}, "key": {3: "colwise"}}
        return wrong.get(self.where, self._given("parallel_plan", {}))

    def split_stages(self, num_stages: int) -> Any:
        if self.where == "few layers":
            return split_evenly(len(self.layers), num_stages)
        wrong: dict[str, Any] = {"no stages": None, "numbers": [1, 2]}
        return wrong.get(self.where, self._given("split_stages", [self] * num_stages))


class Frozen(Plain):
    """Has no parameter that trains."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.requires_grad_(False)


def detached(logits: Tensor, targets: Tensor) -> Tensor:
    """Nothing flows back."""
    return cross_entropy(logits.detach(), targets)


def no_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """A gradient that is no number, of a loss that is 0."""
    return (logits.sum() * 0).sqrt()


def changes(logits: Tensor, targets: Tensor) -> Tensor:
    """Spoils the logits for whoever comes next."""
    return cross_entropy(logits.mul_(0.5), targets)


def exits(logits: Tensor, targets: Tensor) -> Tensor:
    """Ends the process as if all were well."""
    raise SystemExit(0)


class Unmade(torch.optim.SGD):
    """Can't be made."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        raise KeyError("momentum")


class Empty(torch.optim.Optimizer):
    """Forgets the base class's __init__."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        pass


class Stateless(ByNorm):
    """Loses the state."""

    def step(self, closure: None = None) -> None:
        self.state = None  # type: ignore[assignment]


class Diverges(ByNorm):
    """Gives weights that are no numbers."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.fill_(float("nan"))
