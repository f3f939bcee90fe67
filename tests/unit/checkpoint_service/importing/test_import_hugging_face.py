"""Imports of Hugging Face folders: whatever files and types they have, and everything that stands against one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.foreign_checkpoints import Foreign, assert_equal, job_of, write_hugging_face

from phalanx.checkpoint.export import Target, export
from phalanx.checkpoint.importing.run import Import, Options
from phalanx.checkpoint.place import JobPlace
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState
from phalanx.models.hugging_face import name_to_hugging_face
from phalanx.snapshot import load
from phalanx.spec import Job
from phalanx.trainer.places import job_store


@pytest.mark.parametrize("num_files", [1, 3])
def test_import_of_fp32_weights_is_bit_equal_and_begins_with_an_optimizer_of_zeros(
    tmp_path: Path, job: Job, foreign: Foreign, num_files: int
) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign, num_files=num_files)
    heard: list[int] = []
    report = Import(job, str(folder)).run(heard.append)
    assert_equal(load(job_store(job).url), foreign.tensors(with_optimizer=False))
    assert sum(heard) == report.num_bytes and (report.attempt, report.step, report.num_updates) == (1, 0, 0)
    manifest = Lineage(job_store(job)).manifest(CheckpointRef(1, 0))
    assert manifest.loader == LoaderState(0, 0) and manifest.schedule == {"num_updates": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_import_of_a_half_precision_type_widens_it_exactly(
    tmp_path: Path, job: Job, foreign: Foreign, dtype: torch.dtype
) -> None:
    Import(job, str(write_hugging_face(tmp_path / "hf", foreign, dtype))).run()
    found = load(job_store(job).url)
    for name, weight in foreign.weights.items():
        np.testing.assert_array_equal(found[f"model.{name}"], weight.to(dtype).float().numpy())


def test_the_attempt_says_what_was_imported(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    report = Import(job, str(folder)).run()
    (attempt,) = Lineage(job_store(job)).attempts()
    source = attempt.placement["import"]["source"]
    assert source == {
        "kind": "hugging-face",
        "url": folder.as_uri(),
        "digest": report.source_digest,
        "rotary": "half",
        "optimizer": "begins anew",
        "left_out": [],
    }


def test_import_then_export_gives_the_weights_back_bit_for_bit(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    Import(job, str(folder)).run()
    place = JobPlace(job_store(job), job)
    target = Target({}, name_to_hugging_face, {})
    export(place.store, place.lineage.manifest(CheckpointRef(1, 0)), tmp_path / "out", target)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_import_lists_every_key_in_which_config_json_differs(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign, rms_norm_eps=1e-6, rope_parameters={"rope_theta": 5e5})
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(folder))
    lines = str(caught.value).splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["[model.args] norm_eps", "[model.args] rope_theta"]
    assert "set model.args.norm_eps=1e-06" in lines[0]


def test_import_lists_all_that_is_wrong_with_config_json(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign, vocab_size=None, hidden_size="x", rope_theta="10000")
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(folder))
    lines = str(caught.value).splitlines()
    assert [line.split("config.json ")[1].split()[0].strip(":") for line in lines] == [
        "hidden_size",
        "vocab_size",
        "rope_theta",
    ]
    assert all(line.endswith("; copy the config.json that belongs to the weights") for line in lines)


def test_import_without_config_json_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    (folder / "config.json").unlink()
    with pytest.raises(PhalanxError, match=r"config\.json: expected the configuration"):
        Import(job, str(folder))


def test_import_lists_all_missing_unknown_and_misshapen_tensors(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    """Case 5: what is missing is an error that names it."""
    folder = write_hugging_face(tmp_path / "hf", foreign)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    tensors["lm_head.weight"] = torch.zeros(7, 16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(folder))
    text = str(caught.value)
    assert len(text.splitlines()) == 3
    assert "norm.weight: expected a tensor for it" in text
    assert "model.layers.0.self_attn.q_proj.bias: expected a name" in text and "--leave-out" in text
    assert "lm_head.weight is 'float32 [7, 16]': expected the shape [300, 16]" in text
    assert Lineage(job_store(job)).read_job() is None


def test_a_tensor_left_out_by_name_is_reported(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    extra = {"model.layers.0.extra": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file({**load_file(folder / "model.safetensors"), **extra}, folder / "model.safetensors")
    report = Import(job, str(folder), Options(leave_out=("model.layers.0.extra",))).run()
    assert report.left_out == tuple(sorted(extra))


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    job = job_of(tmp_path, tie_embeddings=True)
    foreign = Foreign.of(job)
    folder = write_hugging_face(tmp_path / "hf", foreign)
    Import(job, str(folder)).run()
    assert_equal(load(job_store(job).url), foreign.tensors(with_optimizer=False))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path: Path, same: bool) -> None:
    job = job_of(tmp_path, tie_embeddings=True)
    folder = write_hugging_face(tmp_path / "hf", Foreign.of(job))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (0 if same else 1)
    save_file(tensors, folder / "model.safetensors")
    planned = Import(job, str(folder))
    if same:
        assert planned.run().left_out == ("lm_head.weight",)
        return
    with pytest.raises(PhalanxError, match="tie_embeddings"):
        planned.run()
    assert Lineage(job_store(job)).read_job() is None


def _file(row: dict[str, object]) -> bytes:
    """A safetensors file that says this of a tensor, without values."""
    header = json.dumps({"a": row}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        (3).to_bytes(8, "little") + b"{]}",
        _file({"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}),
        _file({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}),
    ],
)
def test_a_damaged_safetensors_file_is_named(tmp_path: Path, job: Job, foreign: Foreign, header: bytes) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    (folder / "model.safetensors").write_bytes(header)
    with pytest.raises(PhalanxError, match=r"model\.safetensors.*copy it again"):
        Import(job, str(folder))


def test_a_folder_that_lacks_a_file_of_its_index_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign, num_files=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PhalanxError, match=r"model-00002-of-00002\.safetensors"):
        Import(job, str(folder))


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path, job: Job) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PhalanxError, match="SOURCE"):
        Import(job, str(tmp_path / "empty"))


def test_a_job_with_muon_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    muon = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"name": "muon"})})
    with pytest.raises(PhalanxError, match=r"optimizer\.name is 'muon': expected adamw"):
        Import(muon, str(write_hugging_face(tmp_path / "hf", foreign)))


def test_interleaved_pairs_contradict_hugging_face_names(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    with pytest.raises(PhalanxError, match="--rotary"):
        Import(job, str(folder), Options(rotary="interleaved"))


def test_shards_of_torchs_own_safetensors_writer_are_joined(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for shard in range(2):
        rows = {
            name: (each.shape[0] // 2 * shard, each[each.shape[0] // 2 * shard :]) for name, each in tensors.items()
        }
        part = {
            n: v[: len(tensors[n]) // 2].contiguous() if shard == 0 else v.contiguous() for n, (_, v) in rows.items()
        }
        offsets = {n: {"saved_offsets": [first] + [0] * (tensors[n].dim() - 1)} for n, (first, _) in rows.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"}
        save_file(part, folder / f"shard-{shard + 1:05d}-model-00001-of-00001.safetensors", metadata)
    Import(job, str(folder)).run()
    assert_equal(load(job_store(job).url), foreign.tensors(with_optimizer=False))


@pytest.mark.parametrize("step", [-1, 100_000_000, 99_999_999_999])
def test_import_at_a_step_that_no_key_can_hold_writes_nothing(
    tmp_path: Path, job: Job, foreign: Foreign, step: int
) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    with pytest.raises(
        PhalanxError, match=rf"^--step is {step}: expected a whole number of up to 8 digits; give the optimizer"
    ):
        Import(job, str(folder), Options(step=step))
    assert list(job_store(job).list("")) == []
    assert Import(job, str(folder), Options(step=99_999_999)).run().step == 99_999_999


def test_import_from_an_empty_path_is_none_from_the_current_folder(job: Job) -> None:
    with pytest.raises(PhalanxError, match="SOURCE is '': expected a folder or its URL"):
        Import(job, "")
