"""The counts against the decoder itself, built without memory."""

from __future__ import annotations

import pytest
import torch

from phalanx.models.args import DecoderArgs, MlaShape, MoeShape
from phalanx.models.decoder import Decoder
from phalanx.planner import ModelShape, RunShape, count_parameters, positions, rank_parameters
from phalanx.planner.activations import layer_bytes_per_token
from phalanx.planner.shape import LatentAttention
from phalanx.spec import Layout

SHAPES = [
    {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 192, "vocab_size": 512},
    {"dim": 64, "n_layers": 5, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 96, "vocab_size": 100, "tie_embeddings": True},
    {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14_336, "vocab_size": 128_256},
]


def built(shape):
    with torch.device("meta"):
        return Decoder(DecoderArgs(**shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_total_equals_what_the_decoder_has(shape):
    assert count_parameters(ModelShape(**shape)).total == sum(p.numel() for p in built(shape).parameters())


@pytest.mark.parametrize("more", [{"qk_norm": True}, {"qkv_bias": True}, {"qk_norm": True, "qkv_bias": True}])
def test_norms_and_biases_of_heads_are_counted_and_biases_cut(more):
    shape = SHAPES[0] | more
    model, layout = ModelShape(**shape, head_width=24), Layout(tp=2)
    total = sum(p.numel() for p in built(shape | {"head_dim": 24}).parameters())
    assert count_parameters(model).total == total
    held = rank_parameters(model, layout, 2, is_first=True, is_last=True)
    norms = (2 * 2 + 1) * 64 + 2 * 2 * 24 * more.get("qk_norm", False)
    assert held.whole == norms and 2 * held.split + held.whole == total


@pytest.mark.parametrize("pp", [2, 4])
def test_each_pipeline_position_equals_what_its_stage_has(pp):
    shape, layout = SHAPES[2], Layout(pp=pp)
    stages = built(shape).split_stages(pp)
    for place in positions(ModelShape(**shape), layout, RunShape(128, 8)):
        held = rank_parameters(
            ModelShape(**shape), layout, place.num_layers, is_first=place.is_first, is_last=place.is_last
        )
        assert held.total == sum(p.numel() for p in stages[place.pp_rank].parameters())


def saved_bytes(shape, tokens, dtype):
    """Bytes of distinct storages that a forward keeps for backward, without the parameters."""
    model = Decoder(DecoderArgs(**shape)).to(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    assert logits.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"n_kv_heads": 8}, {"ffn_dim": 512}])
def test_estimated_activations_of_a_layer_are_within_a_tenth_of_what_the_decoder_keeps(dtype, more):
    shape = {"dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 768, "vocab_size": 64} | more
    tokens = torch.zeros(2, 128, dtype=torch.long)
    layers = (saved_bytes(shape | {"n_layers": 5}, tokens, dtype) - saved_bytes(shape, tokens, dtype)) / 3
    planned = layer_bytes_per_token(ModelShape(**shape), Layout(), dtype.itemsize) * tokens.numel()
    assert planned == pytest.approx(layers, rel=0.10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mla", [(64, 32, 16, 32, 96), (64, 32, 16, 48, 0), (128, 32, 16, 24, 128), (32, 24, 8, 32, 0)])
def test_estimated_activations_of_latent_attention_are_within_a_tenth_of_what_the_decoder_keeps(dtype, mla):
    shape = {"dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 768, "vocab_size": 64}
    tokens = torch.zeros(2, 128, dtype=torch.long)
    theirs = shape | {"mla": MlaShape(*mla)}
    layers = (saved_bytes(theirs | {"n_layers": 5}, tokens, dtype) - saved_bytes(theirs, tokens, dtype)) / 3
    model = ModelShape(**shape, latent=LatentAttention(mla[4], *mla[:4]))
    planned = layer_bytes_per_token(model, Layout(), dtype.itemsize) * tokens.numel()
    assert planned == pytest.approx(layers, rel=0.10)


@pytest.mark.parametrize("lengths", [(1, 2, 3), (3, 2, 1), (4, 1, 1)])
@pytest.mark.parametrize("query_rank", [0, 24])
def test_stages_with_dense_layers_and_latents_hold_what_is_planned_for_them(lengths, query_rank):
    from phalanx.parallel.tensor import check_plan

    shape = {"dim": 64, "n_layers": 6, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 160, "vocab_size": 512}
    experts = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 48, "num_shared_experts": 1}
    model = ModelShape(**shape, **experts, num_dense_layers=3, latent=LatentAttention(query_rank, 16, 12, 8, 12))
    theirs = built(shape | {"mla": MlaShape(16, 12, 8, 12, query_rank), "moe": MoeShape(**experts, first_k_dense=3)})
    assert count_parameters(model).total == sum(p.numel() for p in theirs.parameters())
    run, layout = RunShape(128, 8, stage_split=lengths), Layout(pp=3, tp=2)
    stages = theirs.split_layers(lengths)
    for place in positions(model, layout, run):
        check = stages[place.pp_rank]
        check_plan(check, check.parallel_plan(), 2)
        held = rank_parameters(
            model,
            layout,
            place.num_layers,
            is_first=place.is_first,
            is_last=place.is_last,
            num_dense=place.num_dense,
        )
        assert held.total == sum(p.numel() for p in check.parameters())


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "qkv_bias": True}])
def test_a_rank_holds_a_whole_head_of_keys_and_values_where_tp_is_a_multiple_of_them(more):
    from phalanx.parallel.tensor import check_plan

    shape = SHAPES[0] | {"n_heads": 8} | more
    model = built(shape)
    check_plan(model, model.parallel_plan(), 8)
    held = rank_parameters(ModelShape(**shape), Layout(tp=8), 2, is_first=True, is_last=True)
    assert model.layers["0"].attention.wk.weight.shape == (8, 64)
    assert held.total == sum(parameter.numel() for parameter in model.parameters())
