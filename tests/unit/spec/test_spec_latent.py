"""`[model.args.mla]` and dense layers before the experts: what is refused in one line, what an identity keeps."""

from __future__ import annotations

from typing import Any

import pytest
from spec_samples import sample, tables

from phalanx.core.errors import PhalanxError
from phalanx.spec import parse_job
from phalanx.spec.experts import MoeArgs

TINY = {"preset": "deepseek-v3-tiny"}


def _refused(args: dict[str, Any], **more: Any) -> str:
    with pytest.raises(PhalanxError) as caught:
        parse_job(tables(model={**TINY, "args": args}, **more))
    return str(caught.value)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"mla": {"qk_rope_head_dim": 7}}, "model.args.mla.qk_rope_head_dim is 7: expected an even width"),
        ({"head_dim": 16}, "model.args.head_dim is 16: expected qk_nope_head_dim + qk_rope_head_dim = 24"),
        ({"n_kv_heads": 2}, "model.args.n_kv_heads is 2: expected n_heads = 4 beside [model.args.mla]"),
        ({"qk_norm": True}, "model.args.qk_norm is True: expected false beside [model.args.mla]"),
        ({"qkv_bias": True}, "model.args.qkv_bias is True: expected false beside [model.args.mla]"),
        ({"mla": {"kv_lora_rank": 0}}, "model.args.mla.kv_lora_rank is 0: expected"),
        ({"mla": {"v_head_dim": -1}}, "model.args.mla.v_head_dim is -1: expected"),
        ({"mla": {"rank": 3}}, "model.args.mla.rank"),
        ({"moe": {"first_k_dense": 3}}, "model.args.moe.first_k_dense is 3: expected less than n_layers = 3"),
        ({"moe": {"first_k_dense": -1}}, "model.args.moe.first_k_dense is -1: expected"),
        ({"moe": {"first_k_dense": 0}}, "model.args.ffn_dim is 160: expected none beside [model.args.moe]"),
        ({"ffn_dim": 0}, "model.args.ffn_dim is 0: expected a positive width of the 1 dense layers"),
        ({"rope_scaling": {"mscale": 0.0}}, "model.args.rope_scaling.mscale is 0.0: expected"),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(args: dict[str, Any], told: str) -> None:
    text = _refused(args)
    assert told in text and all(";" in line for line in text.splitlines())


def _yarn(**more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}}


def test_magnitudes_of_yarn_need_each_other_and_latents() -> None:
    latents = {"q_lora_rank": 0, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    args = {"n_kv_heads": 4, "mla": latents}
    with pytest.raises(PhalanxError, match="mscale_all_dim: expected a value beside mscale; set both"):
        parse_job(tables(model={"preset": "tiny", "args": {**args, **_yarn(mscale=1.0)}}))
    with pytest.raises(PhalanxError, match=r"mscale is 1.0: expected none without \[model.args.mla\]"):
        parse_job(tables(model={"preset": "tiny", "args": _yarn(mscale=1.0, mscale_all_dim=1.0)}))
    job = sample(model={"preset": "tiny", "args": {**args, **_yarn(mscale=1.0, mscale_all_dim=0.5)}})
    assert job.model.decoder.head_dim == 16


def test_tp_must_divide_dense_layers_and_experts() -> None:
    text = _refused({"ffn_dim": 161}, parallel={"tp": 2}, cluster={"nproc": 2})
    assert "parallel.tp is 2: expected a divisor of model.args.ffn_dim = 161" in text


def test_varlen_on_gpus_takes_heads_of_latents_up_to_what_flash_attention_takes() -> None:
    gpu = {"cluster": {"device": "cuda"}, "training__mixed_precision_param": "bfloat16"}
    varlen = {**TINY, "attn_backend": "varlen"}
    assert parse_job(tables(model=varlen, **gpu)).model.decoder.head_dim == 24
    with pytest.raises(PhalanxError, match="sdpa or flex with heads 260 wide"):
        parse_job(tables(model={**varlen, "args": {"mla": {"v_head_dim": 260}}}, **gpu))


def test_new_keys_leave_the_identity_of_older_jobs_alone() -> None:
    plain = sample(model={"preset": "mixtral-tiny", "args": _yarn()}).identity()["model"]["args"]
    assert "mla" not in plain and "first_k_dense" not in plain["moe"]
    assert not {"mscale", "mscale_all_dim"} & plain["rope_scaling"].keys()
    said = sample(model=TINY).identity()["model"]["args"]
    assert said["mla"] == {
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    assert said["moe"]["first_k_dense"] == 1 and "head_dim" not in said
    assert said["rope_scaling"]["mscale"] == said["rope_scaling"]["mscale_all_dim"] == 1.0
    assert "first_k_dense" in MoeArgs(num_experts=2, top_k=1, expert_ffn_dim=4).usual


def test_another_latent_is_another_run() -> None:
    one, other = (sample(model={**TINY, "args": {"mla": {"kv_lora_rank": rank}}}) for rank in (24, 32))
    assert one.identity_digest({"train": "sha256:0"}) != other.identity_digest({"train": "sha256:0"})
    assert one.identity() == sample(model=TINY).identity()


def test_products_in_fp8_of_latents_need_ranks_with_multiples_of_16_of_values() -> None:
    training = {"mixed_precision_param": "bfloat16", "float8_recipe": "rowwise"}
    changes = {f"training__{key}": value for key, value in training.items()}
    layout = {"parallel": {"tp": 2}, "cluster": {"nproc": 2}}
    experts = {"moe": {"expert_ffn_dim": 64}}
    fits = {"model": {**TINY, "args": {"mla": {"v_head_dim": 16}, **experts}}}
    assert parse_job(tables(**fits, **changes, **layout)).training.float8_recipe == "rowwise"
    text = _refused({"mla": {"v_head_dim": 12}, **experts}, **changes, **layout)
    assert "model.args.mla.v_head_dim makes 48 wide, where 2 leaves 24" in text
