"""The numerics contract of latent attention and of dense layers before the experts: every layout gives the loss, the
gradients and the counts of one fp32 process.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_expert_parity import DEEPSEEK, references_in
from test_parity import COMPILE_TIMEOUT_S, _case, _check_table, _gangs, _pipeline

from phalanx.gang.fork_server import ForkServer

pytestmark = pytest.mark.distributed

# Every width is another one, so that none can stand for another; values are narrower and wider than queries.
MLA = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
MODELS: dict[str, dict[str, Any]] = {
    "v3": {
        "n_kv_heads": 4,
        "moe": DEEPSEEK | {"first_k_dense": 1},
        "mla": MLA,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "latent": {"n_kv_heads": 4, "mla": MLA | {"q_lora_rank": 0, "v_head_dim": 14}, "tie_embeddings": True},
    "late": {"n_kv_heads": 4, "mla": MLA, "moe": DEEPSEEK | {"first_k_dense": 3}},  # a stage without experts
}


def _of(reference: str, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    return case | {"reference": reference, "model": MODELS[reference], **more}


TABLE: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": _of("v3", _case()),
        "one_latent": _of("latent", _case(chunk_tokens=5)),
        "selective": _of("v3", _case(recompute="selective")),
        "varlen": _of("latent", _case(attn_backend="varlen", recompute="full")),
        "varlen_v3_surplus": _of("v3", _case(attn_backend="varlen", local_batch_size=3)),
        "bf16": _of("latent", _case(dtype="bfloat16")),
    },
    2: {
        "zero1": _of("v3", _case(zero=1)),
        "zero2_surplus": _of("v3", _case(zero=2, local_batch_size=3)),
        "zero3": _of("latent", _case()),
        "replicate2": _of("v3", _case(dp_replicate=2)),
        "tp2": _of("v3", _case(tp=2)),
        "tp2_latent": _of("latent", _case(tp=2)),
        "tp2_selective": _of("v3", _case(tp=2, recompute="selective")),
        "tp2_bf16": _of("latent", _case(tp=2, dtype="bfloat16")),
        "cp2": _of("v3", _case(cp=2)),
        "cp2_a2a": _of("v3", _case(cp=2, cp_comm_type="a2a")),
        "cp2_varlen": _of("latent", _case(cp=2, attn_backend="varlen")),
        "cp2_a2a_varlen": _of("latent", _case(cp=2, cp_comm_type="a2a", attn_backend="varlen")),
        "cp2_full": _of("v3", _case(cp=2, recompute="full")),
        "ep2": _of("v3", _case(ep=2)),
        "ep2_zero1_full": _of("v3", _case(ep=2, zero=1, recompute="full")),
        "pp2": _of("v3", _pipeline("1f1b", pp=2)),
        "pp2_late": _of("late", _pipeline("1f1b", pp=2)),
        "pp2_late_even": _of("late", _pipeline("gpipe", pp=2, stage_split="even")),
        "pp2_interleaved": _of("late", _pipeline("interleaved_1f1b", pp=2)),
        "pp2_zbv": _of("v3", _pipeline("zbv", pp=2)),
        "pp2_latent": _of("latent", _pipeline("1f1b", pp=2)),
    },
    4: {
        "tp4": _of("latent", _case(tp=4)),
        "dp2_tp2_ep2": _of("v3", _case(tp=2, ep=2)),
        "cp2_tp2": _of("v3", _case(cp=2, tp=2)),
        "cp2_tp2_a2a": _of("v3", _case(cp=2, tp=2, cp_comm_type="a2a")),
        "pp2_tp2": _of("v3", _pipeline("1f1b", pp=2, tp=2)),
        "pp2_cp2": _of("late", _pipeline("interleaved_1f1b", pp=2, cp=2)),
        "pp2_ep2": _of("v3", _pipeline("dualpipev", pp=2, ep=2)),
        "hsdp_ep2": _of("late", _case(dp_replicate=2, ep=2)),
    },
}
COMPILED = {"compiled": _of("latent", _case(), compile=True)}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return references_in(tmp_path_factory.mktemp("references"), MODELS)


@pytest.mark.parametrize(("world_size", "names"), _gangs(TABLE))
def test_every_layout_of_latent_attention_gives_loss_gradients_and_counts_of_one_process(
    fork_server: ForkServer, references: dict[str, str], world_size: int, names: list[str]
) -> None:
    _check_table(fork_server, references, world_size, {name: TABLE[world_size][name] for name in names})


@pytest.mark.timeout(COMPILE_TIMEOUT_S)
def test_compiled_blocks_of_latent_attention_give_loss_and_gradients_of_one_process(
    fork_server: ForkServer, references: dict[str, str]
) -> None:
    _check_table(fork_server, references, 1, COMPILED, COMPILE_TIMEOUT_S - 10)
