"""Floating-point operations a token, exactly as the matrix products of the decoder have them (a multiply-add counts 2).

Forward: 2 for each weight that a token meets in a matrix product (all active ones but norms and the embedding, which is
looked up; a tied table still counts as head), and for attention 4 h hd S in each layer: scores and weighted values over
S keys (a sliding window meets fewer). Backward is twice the forward (PaLM, arXiv 2204.02311, appendix B:
6 N + 12 L H Q T). Causal attention, counted once, meets (S + 1) / 2 keys on average; which of the two a published MFU
used differs, so both are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.parameters import count_parameters
from phalanx.planner.shape import ModelShape


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Operations for one token. recompute: what a second forward through the layers adds (0 without recompute)."""

    forward: float
    backward: float
    recompute: float

    @property
    def model(self) -> float:
        """Forward and backward: what MFU counts."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """With recompute: what HFU counts."""
        return self.model + self.recompute


def token_flops(model: ModelShape, seq_len: int, *, causal: bool, recompute: float = 0.0) -> TokenFlops:
    """Operations for one token in windows of `seq_len` (document boundaries, which only lower them, are not counted).

    causal: whether masked scores are left out. recompute: share of the layers whose inside is computed once more,
    0 to 1; the head is never.
    """
    counts = count_parameters(model)
    head = model.vocab_size * model.dim
    layers = counts.active - counts.embedding - counts.head - counts.norms
    keys = model.mean_keys(seq_len, causal=causal)
    in_layers = 2.0 * layers + 2.0 * model.n_layers * (model.score_width + model.value_width) * keys
    forward = in_layers + 2.0 * head
    return TokenFlops(forward, 2 * forward, recompute * in_layers)


def training_days(parameters: float, tokens: float, gpus: int, flops_per_gpu: float, *, recompute: bool) -> float:
    """Days to train on `tokens`, by the rule of thumb 8 T P / (n X) with full recompute and 6 T P / (n X) without.

    flops_per_gpu: operations a second that one GPU reaches. Narayanan et al. 2021, arXiv 2104.04473, section 5.1.
    """
    return (8 if recompute else 6) * tokens * parameters / (gpus * flops_per_gpu) / 86_400
