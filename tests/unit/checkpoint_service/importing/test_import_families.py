"""Folders that transformers itself wrote of models other than plain Llama, imported and exported again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.datasets import make_job
from support.foreign_checkpoints import Foreign, job_of, torchtitan_state, write_dcp, write_hugging_face

from phalanx.checkpoint.export import Target, export
from phalanx.checkpoint.importing.run import Import, Options
from phalanx.checkpoint.place import JobPlace
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.hugging_face import config_to_hugging_face, name_to_hugging_face
from phalanx.snapshot import load
from phalanx.spec import Job
from phalanx.trainer.places import job_store

TWINS = {
    "llama3-tiny": {},
    "qwen3-tiny": {},
    "qwen3-tiny tied": {"tie_embeddings": True},
    "tiny of qwen2": {"qkv_bias": True},
    "mixtral-tiny": {},
    "qwen3-moe-tiny": {},
    "deepseek-v3-tiny": {},
    "deepseek-v3-tiny with queries from the input": {"mla": {"q_lora_rank": 0}},
    "deepseek-v3-tiny with two dense layers, tied": {"moe": {"first_k_dense": 2}, "tie_embeddings": True},
}
SCALING = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
SCALING |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _twin(folder: Path, name: str) -> Job:
    job = job_of(folder)  # its data
    return make_job(
        job.job.storage, job.data.train, more={"model": {"preset": name.split()[0], "args": TWINS.get(name, {})}}
    )


@pytest.mark.parametrize("name", TWINS)
def test_a_folder_of_transformers_is_imported_and_exported_with_equal_bits_and_logits(
    tmp_path: Path, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    job = _twin(tmp_path, name)
    args = DecoderArgs.of(job.model.decoder)
    config = config_to_hugging_face(args, max_position_embeddings=128)
    torch.manual_seed(4)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    ).eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:  # a norm of ones or a bias of zeros would prove nothing
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in theirs.named_buffers():
        if "correction_bias" in name:
            torch.nn.init.uniform_(buffer, -0.1, 0.1)
    theirs.save_pretrained(tmp_path / "hf")
    Import(job, str(tmp_path / "hf")).run()
    decoder = Decoder(args)
    found = load(job_store(job).url)
    if args.tie_embeddings:
        found = {**found, "model.output.weight": found["model.tok_embeddings.weight"]}
    decoder.load_state_dict({name: torch.from_numpy(found[f"model.{name}"]) for name in decoder.state_dict()})
    with torch.no_grad():
        tokens, positions = torch.randint(0, args.vocab_size, (2, 96)), torch.arange(96).expand(2, -1)
        torch.testing.assert_close(decoder(tokens, positions, None), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    place = JobPlace(job_store(job), job)
    target = Target(config, partial(name_to_hugging_face, model_type=config["model_type"]), {})
    export(place.store, place.lineage.manifest(CheckpointRef(1, 0)), tmp_path / "out", target)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)


def test_layers_that_predict_further_tokens_are_left_out_and_told(tmp_path: Path) -> None:
    job = _twin(tmp_path, "deepseek-v3-tiny")
    foreign = Foreign.of(job)
    args, more = foreign.args, {}
    for name in ("eh_proj", "enorm", "embed_tokens", "self_attn.q_a_proj", "mlp.experts.0.up_proj"):
        more[f"model.layers.{args.n_layers}.{name}.weight"] = torch.ones(3)
    folder = _deepseek_folder(tmp_path / "hf", foreign, more, num_nextn_predict_layers=1)
    report = Import(job, str(folder)).run()
    assert report.left_out == tuple(sorted(more)) and report.rotary == "interleaved"
    found = load(job_store(job).url)
    assert all(f"layers.{args.n_layers}" not in name for name in found)
    for name, expected in foreign.weights.items():
        assert torch.equal(torch.from_numpy(found[f"model.{name}"]), expected)


def test_layers_behind_the_last_are_unknown_where_config_json_tells_of_none(tmp_path: Path) -> None:
    job = _twin(tmp_path, "deepseek-v3-tiny")
    foreign = Foreign.of(job)
    name = f"model.layers.{foreign.args.n_layers}.enorm.weight"
    folder = _deepseek_folder(tmp_path / "hf", foreign, {name: torch.ones(3)}, num_nextn_predict_layers=0)
    (line,) = _refused(job, folder)
    assert line.startswith(f"{name}: expected a name of the built-in decoder")


def test_half_rotation_of_latent_attention_is_refused(tmp_path: Path) -> None:
    job = _twin(tmp_path, "deepseek-v3-tiny")
    folder = _deepseek_folder(tmp_path / "hf", Foreign.of(job), {})
    with pytest.raises(
        PhalanxError, match="--rotary is 'half': expected interleaved: latent attention pairs neighbours"
    ):
        Import(job, str(folder), Options(rotary="half"))


def _deepseek_folder(folder: Path, foreign: Foreign, more: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    named = {name_to_hugging_face(name, "deepseek_v3"): each for name, each in foreign.weights.items()}
    save_file({**named, **more}, folder / "model.safetensors")
    said = {**config_to_hugging_face(foreign.args, max_position_embeddings=128), **config}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_import_names_every_key_of_scaling_in_which_config_json_differs(tmp_path: Path) -> None:
    job = _twin(tmp_path, "qwen3-tiny")
    foreign = Foreign.of(job)
    scaled = _changed(job, rope_scaling=SCALING)
    folder = write_hugging_face(tmp_path / "hf", Foreign(scaled, foreign.weights, {}, {}))
    lines = _refused(job, folder)
    assert lines[0] == (
        "[model.args] rope_scaling.type: expected 'llama3' as config.json has it; "
        "set model.args.rope_scaling.type=llama3"
    )
    assert [line.split(":")[0] for line in lines[1:]] == [
        f"[model.args] rope_scaling.{key}" for key in SCALING if key != "type"
    ]
    plain = write_hugging_face(tmp_path / "plain", foreign)
    lines = _refused(_twin_with(tmp_path, rope_scaling=SCALING), plain)
    assert "expected none, as config.json has it; remove model.args.rope_scaling.type" in lines[0]


def test_weights_of_normalised_heads_are_missed_by_name(tmp_path: Path) -> None:
    job = _twin(tmp_path, "qwen3-tiny")
    foreign = Foreign.of(job)
    weights = {name: each for name, each in foreign.weights.items() if "layers.1.attention.q_norm" not in name}
    folder = write_hugging_face(tmp_path / "hf", Foreign(foreign.args, weights, {}, {}))
    assert "layers.1.attention.q_norm.weight: expected a tensor for it" in _refused(job, folder)[0]


def test_interleaved_pairs_of_normalised_heads_and_biases_give_the_same_function(tmp_path: Path) -> None:
    job = _twin_with(tmp_path, qkv_bias=True)
    foreign = Foreign.of(job)
    Import(job, str(write_dcp(tmp_path / "dcp", torchtitan_state(foreign))), Options(rotary="interleaved")).run()
    found = load(job_store(job).url)
    theirs = foreign.weights["layers.0.attention.k_norm.weight"].reshape(-1, 2)
    assert found["model.layers.0.attention.k_norm.weight"].tolist() == theirs.T.flatten().tolist()
    theirs = foreign.weights["layers.1.attention.wq.bias"].reshape(4, -1, 2)
    assert found["model.layers.1.attention.wq.bias"].tolist() == theirs.transpose(1, 2).flatten().tolist()
    value = foreign.weights["layers.1.attention.wv.bias"]
    assert found["model.layers.1.attention.wv.bias"].tolist() == value.tolist()


def _twin_with(folder: Path, **args: Any) -> Job:
    job = job_of(folder)
    return make_job(job.job.storage, job.data.train, more={"model": {"preset": "qwen3-tiny", "args": args}})


def _changed(job: Job, **args: Any) -> DecoderArgs:
    return DecoderArgs.of_plain({**job.model.decoder.model_dump(), **args})


def _refused(job: Job, folder: Path) -> list[str]:
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(folder))
    return str(caught.value).splitlines()
