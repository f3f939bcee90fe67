"""Ranks of a pipeline of a user's own model whose stages give what they did not on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from parity import layout_of, make_job, slot_batch
from torch import Tensor, nn

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel import ParallelModel, build_mesh

VOCAB_SIZE, DIM = 24, 8


class Staged(nn.Module):
    """Bigrams that can be cut: the embedding and half of the layers, the other half and the head."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(i): nn.Linear(dim, dim) for i in range(4)})
        self.head: nn.Module | None = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        hidden = tokens if self.embed is None else self.embed(tokens)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        return self.handed(hidden) if self.head is None else self.head(hidden)

    def handed(self, hidden: Tensor) -> Tensor:
        """What the next stage gets."""
        return hidden

    def split_stages(self, num_stages: int) -> Sequence[nn.Module]:
        """In two."""
        first, last = (type(self)(VOCAB_SIZE, DIM).to("meta") for _ in range(num_stages))
        first.head = last.embed = None
        for stage, own in ((first, "01"), (last, "23")):
            stage.layers = nn.ModuleDict({name: layer for name, layer in stage.layers.items() if name in own})
        return first, last


class DropsTokens(Staged):
    """Gives fewer tokens than on the meta device."""

    def handed(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.is_meta else hidden[:, 1:]


class GivesDouble(Staged):
    """Gives another type than that of the weights."""

    def handed(self, hidden: Tensor) -> Tensor:
        return hidden.double()


class GivesTwo(Staged):
    """Gives two tensors in the place of one."""

    def handed(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.is_meta else (hidden, hidden)  # type: ignore[return-value]


def run_stages(context: RankContext) -> None:
    """Entry of the ranks: a step, or an evaluation, of the model `class`; reports the loss."""
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    job = make_job({"world_size": 2, "parallel": {"pp": 2}})
    args = {"vocab_size": VOCAB_SIZE, "dim": DIM}
    model = job.model.model_copy(update={"class_": context.arguments["class"], "args": args})
    job = job.model_copy(update={"model": model})
    layout = layout_of(job, context.world_size)
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    parallel = ParallelModel(job, layout, mesh, "cpu")
    batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, 1, layout.pp, VOCAB_SIZE)
    take = parallel.evaluate if context.arguments["evaluate"] else parallel.forward_backward
    loss = take(batch, valid_tokens)
    dist.all_reduce(loss)
    context.report("result", loss=float(loss))
    dist.destroy_process_group()
