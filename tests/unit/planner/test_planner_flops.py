from __future__ import annotations

import pytest

from phalanx.planner import ModelShape, count_parameters, token_flops

SMALL = ModelShape(dim=8, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=20, vocab_size=10)
LLAMA_8B = ModelShape(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=128_256)


def test_forward_of_a_small_model_is_that_counted_by_hand():
    products = 3 * (192 + 480) + 80
    full = token_flops(SMALL, 5, causal=False)
    assert full.forward == 2 * products + 3 * 4 * 8 * 5
    assert full.backward == 2 * full.forward and full.model == 3 * full.forward == full.hardware


def test_causal_attention_meets_half_the_keys_and_its_own():
    full, causal = (token_flops(SMALL, 5, causal=causal).forward for causal in (False, True))
    # Token i of a window of 5 meets i + 1 keys: 15 of 25 pairs.
    assert full - causal == 3 * 4 * 8 * (25 - 15) / 5


def test_recompute_adds_a_forward_of_the_layers_but_not_of_the_head():
    half = token_flops(SMALL, 5, causal=False, recompute=0.5)
    flops = token_flops(SMALL, 5, causal=False, recompute=1.0)
    assert half.recompute == flops.recompute / 2 and half.model == flops.model
    assert flops.hardware - flops.model == flops.forward - 2 * 80


def test_full_attention_agrees_with_the_palm_formula():
    weights = count_parameters(LLAMA_8B)
    in_products = weights.total - weights.embedding - weights.norms
    assert token_flops(LLAMA_8B, 8192, causal=False).model == 6 * in_products + 12 * 32 * 32 * 128 * 8192


@pytest.mark.parametrize("tie", [False, True])
def test_tied_head_costs_as_much_as_its_own(tie):
    model = ModelShape(8, 3, 4, 2, 20, 10, tie_embeddings=tie)
    assert token_flops(model, 5, causal=True).forward == token_flops(SMALL, 5, causal=True).forward


def test_unused_experts_cost_nothing():
    def flops(num_experts, top_k):
        model = ModelShape(8, 3, 4, 2, 0, 10, num_experts=num_experts, top_k=top_k, expert_ffn_dim=5)
        return token_flops(model, 4, causal=True).forward

    assert flops(16, 2) - flops(8, 2) == 3 * 2 * 8 * 8, "only the router grows"
    assert flops(8, 4) - flops(8, 2) == 3 * 2 * 2 * 120
