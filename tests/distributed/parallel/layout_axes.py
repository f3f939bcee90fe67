"""What the generated table of layouts varies: each axis with its values, and the job of a choice of them.

Which choices can be is asked of `phalanx.spec`, by what it refuses and by what it says has no effect; the table is a
covering of the pairs (`support.covering`). A kind of model is one more row of `MODELS`.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from support.covering import Choice, Covering, Refusal, Value, covering

from phalanx.spec import Job
from phalanx.spec.checks import findings_of
from phalanx.spec.effects import without_effect
from phalanx.spec.parallel import MULTI_STAGE_SCHEDULES

MOST_RANKS = 8
SEQ_LEN, VOCAB_SIZE, LEAST_LAYERS = 16, 96, 3
OFFLOAD_FOLDER = tempfile.gettempdir()
# Below every gradient norm of the runs, so that each step is clipped.
MAX_NORM = 0.25
# Large enough that an update of a weight whose gradient is next to nothing is next to nothing: with the usual 1e-8 what
# AdamW divides by is rounding there: one process that takes its windows in another order differs by 3e-5 from itself.
EPS = 1e-3
# Over the small decoder of `tables_of`. The loss of balance weighs enough that what is wrong in it shows.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"ffn_dim": 48},
    "mixtral": {"ffn_dim": 0, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 24, "aux_loss": 0.5}},
    "deepseek": {
        "ffn_dim": 48,
        "moe": {
            "first_k_dense": 1,
            "num_experts": 8,
            "top_k": 3,
            "expert_ffn_dim": 8,
            "num_shared_experts": 1,
            "score": "sigmoid",
            "route_scale": 2.5,
            "num_groups": 4,
            "top_groups": 2,
            "selection_bias": True,
        },
    },
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
# What queries, keys and values come from. Every width of a latent is another one, so that none can stand for another.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "qwen": {"head_dim": 6, "qk_norm": True, "qkv_bias": True, "rope_scaling": _YARN},
    "latent": {
        "mla": {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
}
# The usual value first; None: the job file says nothing of it.
AXES: dict[str, tuple[Value, ...]] = {
    "schedule": (
        None,
        "gpipe",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
    ),
    "pp": (1, 2, 4),
    "dp_shard": (1, 2, 3, 4),
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "ep": (1, 2, 4),
    "model": tuple(MODELS),
    "attention": tuple(ATTENTIONS),
    "uneven_stages": (False, True),
    "zero": (3, 2, 1),
    "precision": ("float32", "bfloat16", "float16"),
    "recompute": ("none", "selective", "full", "full, every 2"),
    "n_kv_heads": (8, 2, 1),
    "local_batch_size": (1, 2, 3),
    "stage_split": (None, "even", "stated"),
    "attn_backend": ("sdpa", "varlen", "flex"),
    "dp_replicate": (1, 2),
    "stages_per_rank": (None, 3),
    "cp_comm_type": (None, "a2a"),
    "reduce": ("float32", "bfloat16"),
    "cpu_offload": (False, True),
    "document_mask": (True, False),
    "tied": (False, True),
    "global_batch_size": (8, 5),
    "chunk_tokens": (0, 5),
    "z_loss": (0.0, 0.05),
    "implementation": ("fused", "foreach", "for-loop"),
    "optimizer": ("adamw", "muon"),
    "decayed": ("matrices", "hidden", "all"),
    "offload": ("none", "nvme"),
    "compile": (False, True),
}
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
_PLACED = (*_SIZES, "ep", "zero", "cpu_offload", "local_batch_size", "schedule", "stages_per_rank", "cp_comm_type")
# The axis that a key of the job file belongs to, where it has another name.
_KEYS = {
    "training.mixed_precision_param": "precision",
    "training.mixed_precision_reduce": "reduce",
    "activation_checkpoint.mode": "recompute",
    "activation_checkpoint.every": "recompute",
    "model.args.tie_embeddings": "tied",
    "model.args.moe": "model",
    "model.args.ffn_dim": "model",
    "model.args.mla": "attention",
    "optimizer.name": "optimizer",
    "compile.enable": "compile",
}
# On CPUs torch offloads all the same, from host memory into host memory; windows beyond a rank's share are computed.
_ACTS_ALL_THE_SAME = ("parallel.cpu_offload ", "parallel.local_batch_size ")
_TABLES = ("model.args.moe", "model.args.mla")
_KEY = re.compile(r"\b(?:[a-z_]+\.)+[a-z_]+")


def world_size_of(choice: Mapping[str, Value]) -> int:
    """Ranks of a choice."""
    return math.prod(int(choice[axis] or 1) for axis in _SIZES)


def tables_of(choice: Mapping[str, Value]) -> dict[str, Any]:
    """The job file of a choice, as raw tables."""
    model = {"dim": 32, "n_heads": 8, "vocab_size": VOCAB_SIZE, "tie_embeddings": choice["tied"]}
    model |= {"n_layers": _num_layers(choice), "n_kv_heads": choice["n_kv_heads"]}
    placed = {key: choice[key] for key in _PLACED if choice[key] is not None}
    if choice["stage_split"] is not None:
        placed["stage_split"] = _stated(choice) if choice["stage_split"] == "stated" else choice["stage_split"]
    mode, _, every = str(choice["recompute"]).partition(", every ")
    return {
        "job": {"name": "layouts", "storage": "memory://layouts"},
        "model": {
            "args": model | MODELS[str(choice["model"])] | ATTENTIONS[str(choice["attention"])],
            "attn_backend": choice["attn_backend"],
        },
        "data": {"train": "memory://layouts/train", "document_mask": choice["document_mask"]},
        "training": {
            "seq_len": SEQ_LEN,
            "steps": 5,
            "global_batch_size": choice["global_batch_size"],
            "seed": 5,
            "max_norm": MAX_NORM,
            "mixed_precision_param": choice["precision"],
            "mixed_precision_reduce": choice["reduce"],
        },
        "optimizer": {"lr": 3e-3, "eps": EPS, "name": choice["optimizer"], "offload": choice["offload"]}
        | {key: choice[key] for key in ("implementation", "decayed")}
        | ({} if choice["offload"] == "none" else {"offload_folder": OFFLOAD_FOLDER}),
        "parallel": placed,
        "activation_checkpoint": {"mode": mode, **({"every": int(every)} if every else {})},
        "loss": {"chunk_tokens": choice["chunk_tokens"], "z_loss": choice["z_loss"]},
        "compile": {"enable": choice["compile"]},
        "cluster": {"nproc": world_size_of(choice)},
    }


def _num_stages(choice: Mapping[str, Value]) -> int:
    per_rank = choice["stages_per_rank"] or (2 if choice["schedule"] in MULTI_STAGE_SCHEDULES else 1)
    return int(choice["pp"] or 1) * int(per_rank)


def _num_layers(choice: Mapping[str, Value]) -> int:
    """The fewest that are enough, since time goes with them; one more where stages are to be uneven."""
    num_stages = _num_stages(choice)
    return num_stages * -(-LEAST_LAYERS // num_stages) + bool(choice["uneven_stages"])


def _stated(choice: Mapping[str, Value]) -> str:
    """Layers of each stage with those left over to the first ones, which neither rule of the job file gives."""
    each, left = divmod(_num_layers(choice), _num_stages(choice))
    return ",".join(str(each + (stage < left)) for stage in range(_num_stages(choice)))


def refusal_of(choice: Mapping[str, Value]) -> Refusal | None:
    """What `phalanx.spec` says against a choice: its first finding, or a key that would have no effect."""
    world_size = world_size_of(choice)
    if world_size > MOST_RANKS:
        return Refusal(f"more than {MOST_RANKS} ranks", frozenset(a for a in _SIZES if choice[a] != 1))
    job = Job.model_validate(tables_of(choice))
    for finding in findings_of(job, world_size):
        return Refusal(str(finding.problem), _axes_of(finding.keys))
    for said in without_effect(job, job.layout(world_size)):
        axes = _axes_of(_KEY.findall(said))
        if axes and not said.startswith(_ACTS_ALL_THE_SAME):
            return Refusal(said, axes)
    return None


def _axes_of(keys: Any) -> frozenset[str]:
    found: set[str] = set()
    for key in keys:
        name = next((table for table in _TABLES if key.startswith(table)), key)
        axis = _KEYS.get(name, name.rpartition(".")[2])
        if key == "parallel":
            found.update(_SIZES)
        elif axis in AXES:
            found.add(axis)
    return frozenset(found)


@functools.cache
def layouts() -> Covering:
    """The table: rows of choices, and what is refused."""
    return covering(AXES, refusal_of)


def in_fp32(choice: Choice) -> Choice:
    """The same layout with all arithmetic in fp32, where the bounds are tight."""
    return {**choice, "precision": "float32", "reduce": "float32"}


def is_narrow(choice: Mapping[str, Value]) -> bool:
    """Whether a choice computes or sums in less than fp32."""
    return (choice["precision"], choice["reduce"]) != ("float32", "float32")


def said_of(choice: Choice) -> dict[str, Value]:
    """What of a choice is not usual."""
    return {axis: value for axis, value in choice.items() if value != AXES[axis][0]}
