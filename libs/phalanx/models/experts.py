"""The feed-forward of a mixture of experts: a router sends each token to `top_k` of many SwiGLU experts; every token
also passes the shared ones, if any.

The rows of a token's experts are sorted by expert, so that each expert multiplies one segment of any length, nought
included, and no token is dropped. Which order rows are added in depends on nothing but the token, so that sums are the
same in every run. Like the rest of the decoder this knows nothing of processes: tensor parallelism cuts the weights of
`Experts`, expert parallelism gives it an `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.args import MoeShape
from phalanx.models.balance import Balance

GROUPED_ALIGNMENT_BYTES = 16  # of the rows that torch's grouped product takes
Product = Callable[[Tensor, Tensor], Tensor]


class Router(nn.Module):
    """Chooses experts by token. Its arithmetic is fp32, and so is the bias of the choice, which no gradient trains."""

    def __init__(self, dim: int, shape: MoeShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.num_experts, dim).normal_(std=0.02))
        self.selection_bias = (
            nn.Parameter(torch.zeros(shape.num_experts), requires_grad=False) if shape.selection_bias else None
        )
        self.balance = Balance(shape)

    def forward(self, x: Tensor, window_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts int64 and their weights fp32, each [B, S, top_k], of tokens x [B, S, D]. window_weights: [B], see
        `Balance`; None: nothing is counted.
        """
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.shape.score == "softmax" else logits.sigmoid()
        chosen = self._chosen(scores.detach())
        weights = scores.gather(-1, chosen)
        if self.shape.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.shape.route_scale
        if window_weights is None or not torch.is_grad_enabled():
            return chosen, weights
        return chosen, self.balance.counted(weights, scores, chosen, window_weights)

    def _chosen(self, scores: Tensor) -> Tensor:
        """The best experts by score plus bias; with groups, of the best groups alone (DeepSeek-V3, arXiv 2412.19437,
        section 2.1.2; a group is as good as its two best experts, without a bias as its best: DeepSeek-V2, arXiv
        2405.04434, section 2.2.2).
        """
        shape = self.shape
        choice = scores if self.selection_bias is None else scores + self.selection_bias.float()
        if shape.num_groups > 1:
            grouped = choice.view(*choice.shape[:-1], shape.num_groups, -1)
            best = 1 if self.selection_bias is None else min(2, grouped.shape[-1])
            groups = grouped.topk(best, dim=-1).values.sum(-1).topk(shape.top_groups, dim=-1).indices
            is_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, groups, False)
            choice = grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)
        return choice.topk(shape.top_k, dim=-1).indices


def stored_name(name: str, expert: int) -> str:
    """What the part of a stacked parameter that is one expert's is called in checkpoints: `experts.3.w1.weight`."""
    module, _, own = name.rpartition(".")
    return f"{module}.{expert}.{own}.weight"


def stacked_names(module: nn.Module) -> dict[str, int]:
    """The parameters of `module` that stack experts, and how many each has."""
    return {
        f"{name}.{own}": len(parameter)
        for name, inner in module.named_modules()
        if isinstance(inner, Experts)
        for own, parameter in inner.named_parameters()
    }


def stored_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names under which checkpoints hold the parameters of `module`, tied ones once, and the shape of each."""
    stacked = stacked_names(module)
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        if name in stacked:
            found |= {stored_name(name, expert): tuple(parameter.shape[1:]) for expert in range(stacked[name])}
        else:
            found[name] = tuple(parameter.shape)
    return found


def stored_names(module: nn.Module) -> Iterator[str]:
    """The names of `stored_shapes`."""
    yield from stored_shapes(module)


class _RowsOfExperts(torch.autograd.Function):
    """Rows of tokens in the order of their experts. Backward adds each token's rows in the order of its choice: the
    gradient that indexing has is a sum in whatever order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return rows.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        by_token = gradients[0].index_select(0, inverse).view(-1, ctx.top_k, gradients[0].shape[-1])
        return by_token.sum(1), None, None, None


class Experts(nn.Module):
    """All routed experts, SwiGLU each, by stacked weights: w1 and w3 [E, F, D], w2 [E, D, F]. In a state dict, as in a
    checkpoint, each expert's weights have names of their own (`stored_name`).
    """

    def __init__(self, dim: int, shape: MoeShape) -> None:
        super().__init__()
        self.num_experts = shape.num_experts
        sizes = (shape.num_experts, shape.expert_ffn_dim, dim)
        self.w1 = nn.Parameter(torch.empty(sizes).normal_(std=0.02))
        self.w2 = nn.Parameter(torch.empty(sizes).mT.contiguous().normal_(std=0.02))
        self.w3 = nn.Parameter(torch.empty(sizes).normal_(std=0.02))
        self.product: Product = F.linear
        self.exchange: Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor] | None = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [B, S, D]; chosen, weights [B, S, top_k] as from `Router`; the weighted sum over each token's experts."""
        if x.is_meta:  # no token has an expert there
            return torch.empty_like(x)
        rows, top_k = x.flatten(0, -2), chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        sorted_rows: Tensor = _RowsOfExperts.apply(rows, order, inverse, top_k)  # type: ignore[no-untyped-call]
        if self.exchange is None:
            outputs = self.segments(sorted_rows, counts)
        else:
            outputs = self.exchange(sorted_rows, counts, self.segments)
        by_token = outputs.index_select(0, inverse).view(*chosen.shape, outputs.shape[-1])
        y: Tensor = (by_token * weights.unsqueeze(-1)).sum(-2)
        return y.to(x.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, stacked in self.named_parameters(recurse=False):
            for expert, weight in enumerate(stacked if keep_vars else stacked.detach()):
                destination[stored_name(prefix + name, expert)] = weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, stacked in self.named_parameters(recurse=False):
            names = [stored_name(prefix + name, expert) for expert in range(len(stacked))]
            if all(each in state_dict for each in names):
                state_dict[prefix + name] = torch.stack([state_dict.pop(each) for each in names])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def segments(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Outputs [R, D] of rows [R, D] of which the first counts[0] are for expert 0, the next for expert 1, and so
        on; counts: int64 [experts of this rank], adding up to R.
        """
        if _takes_grouped(rows, self.w1):
            return self._grouped(rows, counts)
        parts = torch.split(rows, counts.tolist())
        weights = zip(self.w1.unbind(0), self.w2.unbind(0), self.w3.unbind(0), strict=True)
        return torch.cat([self._expert(part, *each) for part, each in zip(parts, weights, strict=True)])

    def _expert(self, rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return self.product(F.silu(self.product(rows, w1)) * self.product(rows, w3), w2)

    def _grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        up, gate = (F.grouped_mm(rows, weight.mT, offs=ends) for weight in (self.w3, self.w1))
        return F.grouped_mm(F.silu(gate) * up, self.w2.mT, offs=ends)


def _takes_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether one grouped product takes all segments: on GPUs, in bfloat16, with rows of whole 16 bytes. On CPUs a
    product an expert is several times faster.
    """
    aligned = all(size * rows.element_size() % GROUPED_ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and len(rows) > 0


class MixtureFeedForward(nn.Module):
    """Routed experts plus, where there are any, the shared ones: as one SwiGLU of their widths together."""

    def __init__(self, dim: int, shape: MoeShape, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts = Router(dim, shape), Experts(dim, shape)
        self.shared = shared

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, window_weights: Tensor | None = None) -> Tensor:
        """x [B, S, D]; window_weights: see `Router`."""
        routed: Tensor = self.experts(x, *self.router(x, window_weights))
        return routed if self.shared is None else routed + self.shared(x)
