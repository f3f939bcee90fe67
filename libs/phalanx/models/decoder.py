"""The built-in decoder (Llama: RMSNorm, rotary positions, grouped queries, SwiGLU; Qwen2's biases, Qwen3's normalised
heads, a mixture of experts and DeepSeek-V3's latent attention by its arguments) in plain torch.

Nothing here knows about processes: tensor parallelism cuts the weights of these modules and puts its exchanges at the
module boundaries that `parallel_plan` names, so head counts are read off the weights' shapes and never off the
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs, MoeShape
from phalanx.models.attention import Attend, Attention, WholeWindows, check_heads, in_context
from phalanx.models.experts import MixtureFeedForward, Router, stored_names
from phalanx.models.kernels import kernel_named
from phalanx.models.latent import LatentAttention
from phalanx.models.norm import RMSNorm
from phalanx.models.protocol import Context, Initial, KeyValueHeads, Style, consecutive
from phalanx.models.rotary import rotary_table
from phalanx.planner.stage_split import split_layers

INITIAL_STD = 0.02
# What writes to the residual stream.
RESIDUAL_WEIGHTS = ("attention.wo.weight", ".w2.weight")


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def _swiglu_plan(name: str) -> dict[str, Style]:
    return {f"{name}.w1": "colwise", f"{name}.w3": "colwise", f"{name}.w2": "rowwise"}


def _mixture(args: DecoderArgs, moe: MoeShape) -> MixtureFeedForward:
    width = moe.num_shared_experts * moe.expert_ffn_dim
    return MixtureFeedForward(args.dim, moe, FeedForward(args.dim, width) if width else None)


class Block(nn.Module):
    """Decoder layer number `layer`: attention and feed-forward, each on a normalised residual stream."""

    def __init__(self, args: DecoderArgs, attend: Attend, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args, attend) if args.mla is None else LatentAttention(args, attend)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        moe = None if args.is_dense(layer) else args.moe
        self.feed_forward = FeedForward(args.dim, args.ffn_dim) if moe is None else _mixture(args, moe)

    def forward(
        self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Any, window_weights: Tensor | None = None
    ) -> Tensor:
        """x [B, S, D], or its sequence shard [B, S / tp, D]. window_weights: for experts alone."""
        x = x + self.attention(self.attention_norm(x), cosines, sines, mask)
        normal = self.ffn_norm(x)
        if isinstance(self.feed_forward, MixtureFeedForward):
            return x + self.feed_forward(normal, window_weights)  # type: ignore[no-any-return]
        return x + self.feed_forward(normal)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole decoder, or (from `split_stages`) some consecutive layers of it with or without the two ends."""

    def __init__(self, args: DecoderArgs, attn_backend: str = "sdpa") -> None:
        super().__init__()
        self.args = args
        self.attend: Attend = WholeWindows(kernel_named(attn_backend))
        self.gives_hidden = False
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(layer): Block(args, self.attend, layer) for layer in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, args.norm_eps)
        self.output: nn.Linear | None = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        document_ids: Tensor | None,
        window_weights: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] of tokens [B, S]; a later stage takes the hidden state [B, S, D], an earlier one returns
        it. window_weights: [B], what each window's loss of balance counts; None: no router counts anything.
        """
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        cosines, sines = rotary_table(position_ids, self.args)
        mask = self.attend.mask(position_ids, document_ids)
        for layer in self.layers.values():
            hidden = layer(hidden, cosines, sines, mask, window_weights)
        if self.norm is None or self.output is None:
            return hidden
        normal: Tensor = self.norm(hidden)
        return normal if self.gives_hidden else self.output(normal)

    def set_context(self, context: Context) -> None:
        """See `HasContext`."""
        for layer in self.layers.values():
            attention = layer.attention
            assert isinstance(attention, (Attention, LatentAttention)), "blocks are this file's own"
            if context.method == "a2a":
                check_heads(attention.num_heads, attention.num_kv_heads, context.num_ranks)
            attention.attend = in_context(attention.attend.kernel, context)
        for router in self.routers.values():
            router.balance.context = context
        self.attend = in_context(self.attend.kernel, context)

    @property
    def routers(self) -> Mapping[str, Router]:
        """Of the layers that this stage has, by layer; none in a dense model."""
        blocks = {name: layer.feed_forward for name, layer in self.layers.items()}
        return {name: ffn.router for name, ffn in blocks.items() if isinstance(ffn, MixtureFeedForward)}

    def detach_head(self) -> None:
        """See `HasHead`."""
        self.gives_hidden = True

    @property
    def head(self) -> nn.Linear | None:
        """See `HasHead`."""
        return self.output

    def parallel_plan(self) -> Mapping[str, Style]:
        """See `HasParallelPlan`."""
        return {
            "tok_embeddings": "vocab_embedding",
            "layers.*.attention_norm": "sequence_norm",
            **{f"layers.*.attention.{name}": style for name, style in self._attention_plan().items()},
            "layers.*.ffn_norm": "sequence_norm",
            **self._feed_forward_plan(),
            "norm": "sequence_norm",
            "output": "vocab_head",
        }

    def _attention_plan(self) -> Mapping[str, Style]:
        plan: dict[str, Style] = {"wo": "rowwise"}
        if self.args.mla is None:
            heads = KeyValueHeads(self.args.n_kv_heads)
            norms: dict[str, Style] = {"q_norm": "head_norm", "k_norm": "head_norm"} if self.args.qk_norm else {}
            return {**norms, "wq": "colwise", "wk": heads, "wv": heads, **plan}
        for name in ("wkv_a", "kv_a_norm", *(("wq_a", "q_a_norm") if self.args.mla.q_lora_rank else ())):
            plan[name] = "replicated"
        return {**plan, "wkv_b": "colwise", "wq_b" if self.args.mla.q_lora_rank else "wq": "colwise"}

    def _feed_forward_plan(self) -> Mapping[str, Style]:
        place, moe = "layers.*.feed_forward", self.args.moe
        dense = _swiglu_plan(place) if self.args.is_dense(0) else {}
        if moe is None or moe.first_k_dense >= self.args.n_layers:
            return dense
        shared = _swiglu_plan(f"{place}.shared") if moe.num_shared_experts else {}
        return {**dense, f"{place}.router": "router", f"{place}.experts": "experts", **shared}

    def split_stages(self, num_stages: int) -> Sequence[nn.Module]:
        """See `HasStages`; layers are balanced by number."""
        return self.split_layers(split_layers(self.args.n_layers, num_stages))

    def split_layers(self, lengths: Sequence[int]) -> Sequence[nn.Module]:
        """See `HasStageLengths`."""
        if len(lengths) > self.args.n_layers:
            raise PhalanxError(
                "[parallel] pp x stages_per_rank",
                value=len(lengths),
                expected=f"at most n_layers ({self.args.n_layers}) stages",
                remedy="lower pp or stages_per_rank",
            )
        assert min(lengths) > 0 and sum(lengths) == self.args.n_layers, lengths
        return [self._stage(layers) for layers in consecutive(lengths)]

    def _stage(self, layers: range) -> Decoder:
        stage = Decoder.__new__(Decoder)
        nn.Module.__init__(stage)
        stage.args, stage.attend, stage.gives_hidden = self.args, self.attend, self.gives_hidden
        stage.tok_embeddings = self.tok_embeddings if layers.start == 0 else None
        stage.layers = nn.ModuleDict({str(layer): self.layers[str(layer)] for layer in layers})
        is_last = layers.stop == self.args.n_layers
        stage.norm, stage.output = (self.norm, self.output) if is_last else (None, None)
        if stage.tied and self.output is not None:
            weight = self.output.weight
            stage.output = nn.Linear(
                self.args.dim, self.args.vocab_size, bias=False, device=weight.device, dtype=weight.dtype
            )
        return stage

    @property
    def tied(self) -> Mapping[str, str]:
        """See `HasTiedStages`."""
        is_copy = self.args.tie_embeddings and self.output is not None and self.tok_embeddings is None
        return {"output.weight": "tok_embeddings.weight"} if is_copy else {}

    def initial_weights(self) -> Mapping[str, Initial]:
        """See `HasInitialWeights`: normal 0.02; what writes to the residual stream 0.02 / sqrt(2 n_layers); norms 1,
        biases 0 (GPT-2).
        """
        residual_std = INITIAL_STD / math.sqrt(2 * self.args.n_layers)
        initial = {}
        weights = self.state_dict()
        for name in stored_names(self):
            if weights[name].dim() == 1:
                initial[name] = Initial(value=0.0 if name.endswith("bias") else 1.0)
            else:
                is_residual = name.endswith(RESIDUAL_WEIGHTS)
                initial[name] = Initial(std=residual_std if is_residual else INITIAL_STD)
        return initial
