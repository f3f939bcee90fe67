"""`[model.args.moe]`: experts in the place of every layer's feed-forward but the first ones'."""

from __future__ import annotations

from typing import Literal

from phalanx.spec.keys import Mark, Section, key


class MoeArgs(Section):
    """Mixture of experts: every layer's feed-forward, but that of the first ones, becomes `num_experts` routed SwiGLU
    experts. Leave the table out
    for a dense model."""

    num_experts: int = key(
        Mark.IDENTITY, "Routed experts in every layer that has them.", unit="experts", gt=0, shapes=True
    )
    top_k: int = key(Mark.IDENTITY, "Experts that each token is sent to.", unit="experts", gt=0)
    expert_ffn_dim: int = key(Mark.IDENTITY, "Inner width of one expert.", unit="elements", gt=0, shapes=True)
    num_shared_experts: int = key(
        Mark.IDENTITY, "Experts of the same width that every token passes.", 0, unit="experts", ge=0, shapes=True
    )
    score: Literal["softmax", "sigmoid"] = key(
        Mark.IDENTITY,
        "How scores come from the router's logits: over all experts (softmax, as Mixtral and Qwen3) or for each expert "
        "by itself (sigmoid, as DeepSeek-V3).",
        "softmax",
    )
    normalise: bool = key(
        Mark.IDENTITY, "Whether the scores of a token's experts are divided by their sum before they weigh.", True
    )
    route_scale: float = key(Mark.IDENTITY, "What the weights of a token's experts are multiplied by.", 1.0, gt=0)
    num_groups: int = key(Mark.IDENTITY, "Equal groups of consecutive experts; 1: no groups.", 1, unit="groups", gt=0)
    top_groups: int = key(
        Mark.IDENTITY, "Groups that a token's experts may come from, the best ones.", 1, unit="groups", gt=0
    )
    aux_loss: float = key(
        Mark.IDENTITY,
        "Weight of the loss that balances experts, taken window by window and added up over the layers; 0: none.",
        0.0,
        ge=0,
    )
    selection_bias: bool = key(
        Mark.IDENTITY,
        "Whether a bias by expert takes part in the choice alone, raised after each step where an expert had fewer "
        "tokens than the mean and lowered where it had more, as in DeepSeek-V3.",
        False,
        shapes=True,
    )
    bias_update_rate: float = key(
        Mark.IDENTITY, "What a step adds to or takes from the selection bias; 0: the bias stays.", 0.001, ge=0, le=1
    )

    first_k_dense: int = key(
        Mark.IDENTITY,
        "Layers before those with experts, dense and ffn_dim wide, as in DeepSeek-V3.",
        0,
        unit="layers",
        ge=0,
        shapes=True,
    )

    @property
    def usual(self) -> frozenset[str]:
        """Keys of a later version than the first that have their default, which is what was before."""
        first = {"num_experts", "top_k", "expert_ffn_dim", "num_shared_experts"}
        fields = type(self).model_fields.items()
        return frozenset(name for name, f in fields if name not in first and getattr(self, name) == f.default)
