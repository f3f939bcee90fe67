"""Models of a user's own, for `[model] class = "own_models:..."`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phalanx.models.protocol import Initial


class Dropping(nn.Module):
    """Bigrams with dropout, initial weights by counter and two names of one buffer."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)])
        self.head = nn.Linear(8, vocab_size)
        scale = torch.full((8,), 0.5)
        for layer in (self, *self.layers):
            layer.register_buffer("scale", scale, persistent=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden) * layer.scale
        return self.head(hidden * self.scale)

    def initial_weights(self) -> Mapping[str, Initial]:
        return {name: Initial(std=0.3) for name, _ in self.named_parameters()}


class OwnWeights(Dropping):
    """The same with the weights that `__init__` draws."""

    initial_weights = None


class Remembering(Dropping):
    """Has a buffer that a checkpoint would have to hold."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.layers[0].register_buffer("seen", torch.zeros(8))


class Derived(Dropping):
    """Has a buffer computed from a parameter."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("first", self.embed.weight.detach().clone(), persistent=False)


class Partial(Dropping):
    """Has a parameter that doesn't train and one that no loss depends on."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(3, 3))


class Scaled(Dropping):
    """Has a parameter without a dimension."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.gain = nn.Parameter(torch.tensor(1.0))


class Counting(Dropping):
    """Has a parameter of integers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.seen = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


class Lazy(Dropping):
    """Has a parameter whose shape its first forward finds."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.late = nn.LazyLinear(3)


class Masked(Dropping):
    """Has a tensor that is no buffer."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.mask = torch.ones(3, 3).tril()


class Listed(Dropping):
    """Has modules in a plain list, one of them known by another name."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.kept = [self.embed, {"more": (nn.Linear(8, 8),)}]


class Sharing(Dropping):
    """Has a weight in two layers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.layers[1][0].weight = self.layers[0][0].weight


class Known(Dropping):
    """Has a plain list of what it also has as modules, one layer twice and a tensor that lies on the CPU."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.order, self.scales = [*self.layers], torch.ones(3, device="cpu")
        self.layers.append(self.layers[0])
