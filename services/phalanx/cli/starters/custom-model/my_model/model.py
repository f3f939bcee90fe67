"""The model. Change whatever you like; `forward` is all that Phalanx needs.

With `forward` alone a model trains under data parallelism (`dp_replicate`, `dp_shard`, every `zero`), is recomputed,
saved, restored in another layout and evaluated. Three methods more, each of its own, add the rest:

    initial_weights   the same first weights, bit for bit, in every layout, and no process that holds the whole model
    parallel_plan     `[parallel] tp`: which weights are cut over ranks, and how
    split_stages      `[parallel] pp`: the model as stages of a pipeline
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.protocol import Initial, Style, split_evenly


class Block(nn.Module):
    """Attention and feed-forward side by side on one normalised input."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.norm = nn.LayerNorm(dim)
        # Queries, keys and values are layers of their own: tensor parallelism cuts each of them by heads.
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.attended = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        """x: [B, S, D]; under tensor parallelism [B, S / tp, D], which the norm makes whole again."""
        h = self.norm(x)
        # Ask the weights how many heads there are (-1): under tensor parallelism each rank has some of them.
        query, key, value = (
            each(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, key = rotated(query, position_ids), rotated(key, position_ids)
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.attended(heads.transpose(1, 2).flatten(2)) + self.down(F.relu(self.up(h)).square())


def rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    """x [B, H, S, D / H] with its pairs turned by their position [B, S] (rotary embedding, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = position_ids[:, None, :, None] * speeds
    first, second = x.float().split(half, dim=-1)
    turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
    return torch.cat(turned, dim=-1).to(x.dtype)


class MyModel(nn.Module):
    """A small decoder. `[model.args]` of job.toml are the arguments of `__init__`."""

    def __init__(self, vocab_size: int, dim: int = 64, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        # Named `layers`, each entry is sharded, recomputed and compiled by itself. A ModuleDict with the layer's number
        # as its key keeps a layer's name the same in whichever stage of a pipeline it lies.
        self.layers = nn.ModuleDict({str(layer): Block(dim, num_heads) for layer in range(num_layers)})
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        # Buffers, where you have any, are non-persistent: checkpoints hold parameters only.

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """Logits [B, S, V] of tokens, position_ids and document_ids, int64 [B, S] each.

        A window holds several documents: position_ids begin anew with each, and a token may see earlier tokens of its
        own document only (document_ids None: of the whole window).
        """
        x = self.embed(tokens) if self.embed is not None else tokens  # a later stage is given what its forerunner gave
        mask = causal_mask(position_ids, document_ids)
        for layer in self.layers.values():
            x = layer(x, position_ids, mask)
        return self.head(self.norm(x)) if self.head is not None else x

    def initial_weights(self) -> Mapping[str, Initial]:
        """A normal distribution's width, or a constant, for every parameter by its name."""
        initial = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                initial[name] = Initial(std=0.02)
            else:
                initial[name] = Initial(value=1.0 if name.endswith("norm.weight") else 0.0)
        return initial

    def parallel_plan(self) -> Mapping[str, Style]:
        """How tensor parallelism cuts each module that holds parameters; `*` stands for one part of a name.

        colwise gives each rank some of the output features (here: heads), rowwise takes those in and sums over ranks.
        Between the blocks each rank holds a part of the sequence; a sequence_norm makes it whole for what follows.
        """
        return {
            "embed": "vocab_embedding",
            "layers.*.norm": "sequence_norm",
            "layers.*.query": "colwise",
            "layers.*.key": "colwise",
            "layers.*.value": "colwise",
            "layers.*.attended": "rowwise",
            "layers.*.up": "colwise",
            "layers.*.down": "rowwise",
            "norm": "sequence_norm",
            "head": "vocab_head",
        }

    def split_stages(self, num_stages: int) -> Sequence[nn.Module]:
        """The model as `num_stages` modules. Parameters keep their names; None stands for what another stage has."""
        return [self._stage(layers) for layers in split_evenly(len(self.layers), num_stages)]

    def _stage(self, layers: range) -> nn.Module:
        stage = MyModel.__new__(MyModel)
        nn.Module.__init__(stage)
        is_first, is_last = layers.start == 0, layers.stop == len(self.layers)
        stage.embed = self.embed if is_first else None
        stage.layers = nn.ModuleDict({str(layer): self.layers[str(layer)] for layer in layers})
        stage.norm, stage.head = (self.norm, self.head) if is_last else (None, None)
        return stage


def causal_mask(position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Bool [B, 1, S, S]: true where a token (row) may see another (column)."""
    length = position_ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()[None]
    if document_ids is not None:
        mask = mask & (document_ids[:, :, None] == document_ids[:, None, :])
    return mask[:, None]
