"""What Phalanx asks of a model: one `forward`, and a method more for each kind of parallelism beyond data parallelism.

Any `torch.nn.Module` with `LanguageModel.forward` trains under data parallelism, fully sharded or not. `parallel_plan`
adds tensor and sequence parallelism, `split_stages` the pipeline, `initial_weights` initial values that don't depend on
the layout and need no process that holds the whole model. The built-in decoder implements exactly these and is known to
the rest by nothing else.

Checkpoints hold parameters, as fp32 masters whatever float type the class gives them. Buffers must be non-persistent:
`__init__` makes them anew, from its arguments, in every attempt. torch's random numbers (dropout) are seeded before
each step, and evaluation runs in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from phalanx.core.errors import PhalanxError
from phalanx.planner.stage_split import split_layers


@dataclass(frozen=True, slots=True)
class KeyValueHeads:
    """Style of an nn.Linear that gives `num_heads` heads of keys or values: as colwise where tp divides their number.
    Where tp is a multiple of it each rank holds the one head that its queries need, and tp / num_heads consecutive
    ranks the same one; its gradients are summed over them.
    """

    num_heads: int


Style = (
    Literal[
        "colwise",
        "rowwise",
        "vocab_embedding",
        "vocab_head",
        "sequence_norm",
        "head_norm",
        "replicated",
        "router",
        "experts",
    ]
    | KeyValueHeads
)
"""How a module's weights are cut over the `tp` axis, and what it exchanges (Megatron-LM, arXiv 1909.08053 section 3;
sequence parallelism, arXiv 2205.05198 section 4.2). Between blocks activations are [B, S / tp, D].

colwise: nn.Linear, output features cut; input whole, output local features; no exchange.
rowwise: nn.Linear, input features cut; partial outputs are summed and scattered over the sequence.
vocab_embedding: nn.Embedding, rows cut; partial outputs are summed and scattered over the sequence.
vocab_head: nn.Linear, output rows (vocabulary) cut; gives local logits, and the loss never gathers them.
sequence_norm: a normalisation on [B, S / tp, D]; its output is gathered over the sequence, its weight held by every tp
rank.
head_norm: a normalisation of each head that a rank has, [B, H / tp, S, head_dim]; no exchange, its weight held by every
tp rank.
replicated: any module between a sequence_norm and what is colwise, on the whole sequence; no exchange, its weights held
by every tp rank.
router: a `models.experts.Router` on the whole sequence, held by every tp rank.
experts: `models.experts.Experts`, the inner width of each expert cut; partial outputs are summed and scattered over the
sequence.
Gradients of weights held by every tp rank are summed over tp.
"""


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of one parameter: normal with mean 0 and this `std`, or (std = None) the constant `value`."""

    std: float | None = None
    value: float = 0.0


@runtime_checkable
class LanguageModel(Protocol):
    """The least that a model offers."""

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """Logits [B, S, V] (any float type) for tokens, position_ids and document_ids, each int64 [B, S].

        document_ids: tokens attend to earlier tokens of the same id only; None: to every earlier token of the window.
        """


@runtime_checkable
class HasParallelPlan(Protocol):
    """Adds tensor and sequence parallelism."""

    def parallel_plan(self) -> Mapping[str, Style]:
        """Styles by module-name pattern; `*` stands for one part of a dotted name. Modules unnamed must hold no
        parameters, and a pattern that names no module is refused.
        """


@runtime_checkable
class HasStages(Protocol):
    """Adds pipeline parallelism."""

    def split_stages(self, num_stages: int) -> Sequence[nn.Module]:
        """The model cut into `num_stages` modules, first to last, each with a `layers` ModuleDict or none.

        Stage 0 takes tokens, each later one what its forerunner returned (one tensor), the last returns logits; all
        take position_ids and document_ids as well. Parameters keep the names that they have in the whole model. Called
        on the meta device. Raises PhalanxError where the model can't be cut so.
        """


@runtime_checkable
class HasStageLengths(Protocol):
    """Adds to `HasStages` stages of given lengths, which `[parallel] stage_split` asks for."""

    def split_layers(self, lengths: Sequence[int]) -> Sequence[nn.Module]:
        """As `split_stages`, into as many stages as `lengths`, each with so many layers, one at least."""


@runtime_checkable
class HasTiedStages(Protocol):
    """Adds to `HasStages` weights that the first stage and the last one both use, where one has a copy."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Of a stage: its parameters that are copies of one of the first stage's, each with the name of that one, which
        is also its name in the whole model. Empty in every stage but the last, and in a whole model.
        """


@runtime_checkable
class HasInitialWeights(Protocol):
    """Adds initial weights by counter: the same bits in every layout, and no process holds the whole model."""

    def initial_weights(self) -> Mapping[str, Initial]:
        """Initial values by name, one for every parameter; of stacked experts by the names that checkpoints have."""


class Context(Protocol):
    """A rank's share of every window under context parallelism, and the differentiable exchanges that attention needs.

    length: S, of a whole window. spans: the parts of it that this rank has, in their order. num_ranks: of the context.
    method: of `[parallel] cp_comm_type`; a model may follow it or not.
    """

    @property
    def length(self) -> int: ...
    @property
    def spans(self) -> Sequence[range]: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def method(self) -> str: ...

    def gather(self, x: Tensor) -> Tensor:
        """x [B, S / n, ...] of each of n ranks -> [B, S, ...] on all, in the order of the window."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, on each; no gradient goes through it."""

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Each [B, H, S / n, D] of n ranks -> [B, H / n, S, D], whole windows of consecutive heads; n must divide H."""

    def to_sequence(self, x: Tensor) -> Tensor:
        """The way back: [B, H / n, S, D] -> [B, H, S / n, D]."""


@runtime_checkable
class HasContext(Protocol):
    """Adds context parallelism."""

    def set_context(self, context: Context) -> None:
        """From now on `forward` takes tokens and position_ids [B, S / n] of the context's spans, but document_ids of
        whole windows, [B, S]; its attention exchanges by `context`. Called on every stage, after it was cut over tp.
        Raises PhalanxError where its sizes do not allow the method.
        """


@runtime_checkable
class HasHead(Protocol):
    """Adds `[loss] chunk_tokens`: logits that are never whole."""

    def detach_head(self) -> None:
        """From now on `forward` gives what the head takes, [B, S, D], and calls `head` no more. Called before
        `split_stages`, whose last stage then does the same.
        """

    @property
    def head(self) -> nn.Linear | None:
        """The head, a Linear without a bias; None in a stage that has none."""


class TokenSumFunction(Protocol):
    """`[loss] fn` or one of `[metrics.fn]`: a sum over tokens, so that micro-batches and ranks add up to one batch."""

    def __call__(self, logits: Tensor, targets: Tensor, **args: Any) -> Tensor:
        """The sum over the tokens whose target is not -100: 0-dimensional, of any float type; 0 where there are none.

        logits: fp32 [B, S, V], gathered where tensor parallelism cuts the vocabulary. targets: int64 [B, S]. args: of
        `[loss.args]`. A function with a parameter `group` gets the local logits [B, S, V / n] instead and the process
        group of n ranks, in order of vocabulary (None where it is whole); it must give every rank the same.
        """


def split_evenly(num_items: int, num_parts: int) -> list[range]:
    """`num_items` in `num_parts` consecutive ranges whose lengths differ by one at most, the longer ones in the middle.

    The outer stages of a pipeline also carry the embedding and the head, so a layer more goes to the inner ones first.
    Raises PhalanxError where there are fewer items than parts.
    """
    if num_items < num_parts:
        raise PhalanxError(
            "split_stages()",
            value=num_parts,
            expected=f"at most {num_items} stages, as the model has {num_items} layers",
            remedy="lower parallel.pp or stages_per_rank, or give the model more layers",
        )
    return consecutive(split_layers(num_items, num_parts))


def consecutive(lengths: Sequence[int]) -> list[range]:
    """Ranges of these lengths, each beginning where the one before it ends, the first at 0."""
    ends = list(accumulate(lengths))
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
