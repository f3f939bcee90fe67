"""What other trainers save of the job's model: made with torch and safetensors themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from phalanx.checkpoint.importing.parameters import shapes_of
from phalanx.models.args import DecoderArgs
from phalanx.models.hugging_face import config_to_hugging_face, name_to_hugging_face
from phalanx.spec import Job
from support.datasets import make_job, write_dataset

ARGS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 24, "vocab_size": 300}


def job_of(folder: Path, **args: object) -> Job:
    """Such a job; args: of its model."""
    data = folder / "data"
    if not data.exists():
        write_dataset(data.as_uri())
    more = {"model": {"preset": "tiny", "args": {**ARGS, **args}}}
    return make_job((folder / "store").as_uri(), f"{data.as_uri()}/train", more=more)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Tensors by canonical parameter name: fp32 weights and moments, all different, such as training has them."""

    args: DecoderArgs
    weights: Mapping[str, torch.Tensor]
    exp_avg: Mapping[str, torch.Tensor]
    exp_avg_sq: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, job: Job) -> Foreign:
        """Random ones of the shapes of the job's decoder."""
        args = DecoderArgs.of(job.model.decoder)
        draw = torch.Generator().manual_seed(1)
        weights, first, second = (
            {name: torch.randn(shape, generator=draw) / 50 for name, shape in shapes_of(args).items()} for _ in range(3)
        )
        return cls(args, weights, first, {name: each.abs() for name, each in second.items()})

    def tensors(self, *, with_optimizer: bool = True) -> dict[str, np.ndarray]:
        """As `phalanx.snapshot.load` gives the checkpoint in which they are."""
        found = {f"model.{name}": each.numpy() for name, each in self.weights.items()}
        for moment, kind in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            for name, each in kind.items():
                found[f"optim.{name}.{moment}"] = (each if with_optimizer else torch.zeros_like(each)).numpy()
        return found


def write_hugging_face(
    folder: Path, foreign: Foreign, dtype: torch.dtype = torch.float32, num_files: int = 1, **config: Any
) -> Path:
    """A folder as `save_pretrained` leaves it."""
    folder.mkdir()
    theirs = {name_to_hugging_face(name): each.to(dtype) for name, each in foreign.weights.items()}
    said = {**config_to_hugging_face(foreign.args, max_position_embeddings=16), **config}
    (folder / "config.json").write_text(json.dumps(said))
    if num_files == 1:
        save_file(theirs, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        some = dict(list(theirs.items())[number::num_files])
        save_file(some, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(some, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def torchtitan_state(foreign: Foreign, step: int = 7, prefix: str = "") -> dict[str, Any]:
    """What torchtitan gives to dcp.save: flat names of weights, the optimizer flattened by names of parameters."""
    state: dict[str, Any] = {f"{prefix}{name}": each.clone() for name, each in foreign.weights.items()}
    optimizer: dict[str, Any] = {}
    for name in foreign.weights:
        optimizer[f"state.{name}.step"] = torch.tensor(float(step))
        optimizer[f"state.{name}.exp_avg"] = foreign.exp_avg[name].clone()
        optimizer[f"state.{name}.exp_avg_sq"] = foreign.exp_avg_sq[name].clone()
        optimizer[f"param_groups.{name}.lr"] = 1e-3
    return {
        **state,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {"dp_rank_0": b"position"},
        "train_state": {"step": torch.tensor(step, dtype=torch.int32), "ntokens_seen": 99},
    }


def write_dcp(folder: Path, state: Mapping[str, Any]) -> Path:
    """A folder as dcp.save leaves it."""
    dcp.save(dict(state), checkpoint_id=str(folder), no_dist=True)
    return folder


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Every tensor has the same bits."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name].view(np.uint32), values.view(np.uint32), err_msg=name)
