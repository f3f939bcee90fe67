"""`phalanx checkpoint ls|show|verify|export` on a real job: prepared data, a real decoder, two attempts."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from saved_job import DIGEST, draft, file_store, open_attempt, random_tensor, rows_of, same_bits, save, whole_of

from phalanx.checkpoint.export import Target, export
from phalanx.checkpoint.place import find_job
from phalanx.checkpoint.target import hugging_face_target
from phalanx.cli.checkpoint import register
from phalanx.cli.errors import run_reporting_errors
from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.pipeline import prepare
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import source_of
from phalanx.lineage import DamagedObject, Lineage
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.objects import open_store
from phalanx.snapshot.writer import Writer
from phalanx.spec import load_job
from phalanx.spec.job import plain
from phalanx.trainer.preflight import prepare as prepare_job

JOB = """
[job]
name = "tiny"
storage = "file://{folder}/runs"
[model]
preset = "{preset}"
[model.args]
dim = 32
ffn_dim = 64
vocab_size = 320
tie_embeddings = {tied}
[data]
train = "file://{folder}/corpus/train"
[training]
seq_len = 64
steps = 20
global_batch_size = 4
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 2
[checkpoint]
interval = 5
"""


@dataclass(frozen=True)
class SavedJob:
    file: Path
    url: str
    decoder: Decoder
    folder: Path


def make_job(folder: Path, *, tied: bool = False, is_old_record: bool = False, preset: str = "tiny") -> SavedJob:
    """Checkpoints: attempt 1 at 5 and 10, attempt 2 (from 5) at 8 and an unfinished 12, a late (1, 15).

    is_old_record: job.json does not name the tokenizer.
    """
    texts = folder / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"The line number {number} holds. " * 30)
    prepare(source_of(texts), open_store(f"file://{folder}/corpus"), PrepareSettings(vocab_size=300))
    file = folder / "job.toml"
    file.write_text(JOB.format(folder=folder, tied=str(tied).lower(), preset=preset))
    job = load_job(file)
    torch.manual_seed(1)
    decoder = Decoder(DecoderArgs.of(job.model.args))
    for parameter in decoder.parameters():
        if parameter.dim() == 1:  # a norm of ones would prove nothing
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    tensors = {f"model.{name}": value.detach() for name, value in decoder.named_parameters()}
    tensors |= {f"optim.{name}.exp_avg": torch.zeros_like(value) for name, value in decoder.named_parameters()}
    store = file_store(folder / "runs/projects/default/jobs/tiny")
    if is_old_record:
        Lineage(store).create_job(request_id="r", spec=plain(job), identity=job.identity(), identity_digest=DIGEST)
    else:
        prepare_job(job, 1)
    first = open_attempt(store)
    save(store, first, 5, rows_of(tensors, 2))
    save(store, first, 10, rows_of(tensors, 2))
    second = open_attempt(store, avoid=[draft(first, 10).ref])
    save(store, second, 8, rows_of(tensors, 3))
    Writer(store, 0, 2).save(second, 12, rows_of(tensors, 2)[0]).wait(30)
    save(store, first, 15, rows_of(tensors, 2))
    return SavedJob(file, store.url, decoder, folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SavedJob:
    return make_job(tmp_path_factory.mktemp("job"))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    monkeypatch.setattr("sys.argv", ["phalanx", "checkpoint", *arguments])
    code = run_reporting_errors(app)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("by", ["file", "url"])
def test_ls_lists_live_checkpoints(job: SavedJob, monkeypatch, capsys, by: str) -> None:
    code, out, _ = run(monkeypatch, capsys, "ls", str(getattr(job, by)), "--json")
    rows = json.loads(out)["checkpoints"]
    assert code == 0
    assert [(row["attempt"], row["step"], row["world_size"], row["why_dead"]) for row in rows] == [
        (1, 5, 2, None),
        (2, 8, 3, None),
    ]
    assert all(row["num_bytes"] > 10_000 for row in rows)


def test_ls_all_says_why_others_are_dead(job: SavedJob, monkeypatch, capsys) -> None:
    code, out, _ = run(monkeypatch, capsys, "ls", str(job.file), "--all", "--json")
    dead = {(r["attempt"], r["step"]): r["why_dead"] for r in json.loads(out)["checkpoints"] if r["why_dead"]}
    assert code == 0 and set(dead) == {(1, 10), (1, 15), (2, 12)}
    assert "attempt 2 went on from step 5" in dead[(1, 10)] and "went on from step 5" in dead[(1, 15)]
    assert "never committed" in dead[(2, 12)]
    code, out, _ = run(monkeypatch, capsys, "ls", str(job.file), "--all")
    assert code == 0 and "never committed" in out


def test_show_gives_tensors_and_ancestry(job: SavedJob, monkeypatch, capsys) -> None:
    code, out, _ = run(monkeypatch, capsys, "show", str(job.file), "latest", "--json")
    shown = json.loads(out)
    assert code == 0 and (shown["attempt"], shown["step"], shown["position"]) == (2, 8, 64)
    assert shown["parents"] == [{"attempt": 1, "step": 5}]
    rows = {row["name"]: row for row in shown["tensors"]}
    assert rows["model.tok_embeddings.weight"]["shape"] == [320, 32]
    assert rows["model.tok_embeddings.weight"]["num_bytes"] == 320 * 32 * 4
    assert "optim.layers.1.attention.wq.weight.exp_avg" in rows
    code, out, _ = run(monkeypatch, capsys, "show", str(job.file), "8")
    assert code == 0 and "tok_embeddings" in out


def test_show_of_a_checkpoint_that_is_not_live_takes_its_attempt(job: SavedJob, monkeypatch, capsys) -> None:
    code, out, _ = run(monkeypatch, capsys, "show", str(job.file), "1/10", "--json")
    found = json.loads(out)
    assert (code, found["attempt"], found["step"]) == (0, 1, 10)
    assert "attempt 2 went on from step 5" in found["state"]
    for wrong in ("1/11", "0/5", "1/", "/5", "a/5", "1/123456789"):
        code, _, err = run(monkeypatch, capsys, "show", str(job.file), wrong)
        assert code == 2 and wrong in err and "phalanx checkpoint ls --all" in err, err


@pytest.mark.parametrize(("step", "expected"), [("10", "5, 8"), ("x", "latest")])
def test_show_of_a_step_that_is_not_live_names_the_live_ones(job, monkeypatch, capsys, step, expected) -> None:
    code, _, err = run(monkeypatch, capsys, "show", str(job.file), step)
    assert code == 2 and expected in err and len(err.splitlines()) == 1


def test_commands_on_a_place_without_a_job_say_so(tmp_path: Path, monkeypatch, capsys) -> None:
    for command in (["ls"], ["show"], ["verify"], ["export"]):
        more = ["latest", "--out", str(tmp_path / "out")] if command == ["export"] else []
        code, _, err = run(monkeypatch, capsys, *command, f"file://{tmp_path}/nothing", *more)
        assert code == 2 and "expected a job that has been started" in err
    code, _, err = run(monkeypatch, capsys, "ls", str(tmp_path / "no.toml"))
    assert code == 2 and "no.toml" in err


def test_verify_of_a_damaged_checkpoint_names_the_tensor_and_exits_1(tmp_path: Path, monkeypatch, capsys) -> None:
    """Case 7."""
    job = make_job(tmp_path)
    code, out, _ = run(monkeypatch, capsys, "verify", str(job.file), "--json")
    assert code == 0 and json.loads(out)["ok"] is True
    path = tmp_path / "runs/projects/default/jobs/tiny/a00000002/s00000008/objects/00000000-00000000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, _ = run(monkeypatch, capsys, "verify", str(job.file), "--json")
    shown = json.loads(out)
    assert code == 1 and shown["ok"] is False
    assert [len(row["damages"]) for row in shown["checkpoints"]] == [0, 1]
    damage = shown["checkpoints"][1]["damages"][0]
    assert damage["key"].endswith("s00000008/objects/00000000-00000000.safetensors")
    assert damage["tensors"] == ["optim.output.weight.exp_avg"]
    assert damage["chunks"] == [{"tensor": "optim.output.weight.exp_avg", "offset": [0, 0], "chunks": [0]}]
    assert run(monkeypatch, capsys, "verify", str(job.file), "5")[0] == 0
    code, out, _ = run(monkeypatch, capsys, "verify", str(job.file), "latest")
    assert code == 1 and "optim.output.weight.exp_avg (chunk 0)" in out
    code, _, _ = run(monkeypatch, capsys, "export", str(job.file), "latest", "--out", str(tmp_path / "hf"))
    assert code == 0, "the damaged optimizer state is not exported"
    manifest = tmp_path / "runs/projects/default/jobs/tiny/a00000001/s00000005/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":5', b'"step":6'))
    code, out, _ = run(monkeypatch, capsys, "verify", str(job.file), "--json")
    assert code == 1 and json.loads(out)["checkpoints"][0]["damages"][0]["key"].endswith("s00000005/manifest.json")


@pytest.mark.parametrize(
    ("preset", "tied"), [("tiny", False), ("tiny", True), ("llama3-tiny", False), ("qwen3-tiny", True)]
)
def test_export_is_opened_by_transformers_with_equal_bits_and_logits(
    tmp_path: Path, monkeypatch, capsys, preset, tied
) -> None:
    """From a checkpoint of three ranks that each hold a part of every tensor."""
    transformers = pytest.importorskip("transformers")
    job = make_job(tmp_path, tied=tied, preset=preset)
    out = tmp_path / "hf"
    code, text, err = run(monkeypatch, capsys, "export", str(job.file), "latest", "--out", str(out), "--json")
    assert code == 0, err
    assert set(json.loads(text)["files"]) == {path.name for path in out.iterdir()}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    theirs = model.state_dict()
    ours = dict(job.decoder.named_parameters())
    assert same_bits(theirs["model.layers.1.self_attn.k_proj.weight"], ours["layers.1.attention.wk.weight"].detach())
    assert same_bits(theirs["model.layers.0.mlp.up_proj.weight"], ours["layers.0.feed_forward.w3.weight"].detach())
    head = ours["tok_embeddings.weight" if tied else "output.weight"]
    assert same_bits(theirs["lm_head.weight"], head.detach())
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("The line holds.")["input_ids"]) == "The line holds."
    assert tokenizer.eos_token == "<|endoftext|>" and model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == 64
    tokens = torch.randint(0, 320, (2, 16))
    with torch.no_grad():
        expected = job.decoder(tokens, torch.arange(16).expand(2, 16), None)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_export_in_bfloat16_and_several_files_equals_torch(tmp_path: Path, job: SavedJob) -> None:
    transformers = pytest.importorskip("transformers")
    place = find_job(job.url)
    manifest = place.lineage.manifest(place.checkpoint("5"))
    target = hugging_face_target(place, None)
    report = export(place.store, manifest, tmp_path / "hf", target, dtype="bfloat16", file_bytes=20_000)
    assert "model.safetensors.index.json" in report.files and "model-00002-of-00004.safetensors" in report.files
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    weight = job.decoder.layers["0"].feed_forward.w2.weight.detach()
    assert same_bits(model.state_dict()["model.layers.0.mlp.down_proj.weight"], weight.bfloat16())


def test_export_to_an_existing_folder_is_refused(tmp_path: Path, job: SavedJob, monkeypatch, capsys) -> None:
    (tmp_path / "hf").mkdir()
    code, _, err = run(monkeypatch, capsys, "export", str(job.file), "latest", "--out", str(tmp_path / "hf"))
    assert code == 2 and "does not exist yet" in err
    assert list((tmp_path / "hf").iterdir()) == []


def test_export_with_another_tokenizer_or_none_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    job = make_job(tmp_path)
    other = tmp_path / "other.json"
    other.write_bytes((tmp_path / "corpus/tokenizer.json").read_bytes() + b"\n")
    arguments = ("export", str(job.file), "latest", "--out", str(tmp_path / "hf"))
    code, _, err = run(monkeypatch, capsys, *arguments, "--tokenizer", str(other))
    assert code == 2 and "tokenizer of the training data" in err
    code, _, err = run(monkeypatch, capsys, *arguments, "--tokenizer", str(tmp_path / "missing.json"))
    assert code == 2 and "missing.json" in err
    (tmp_path / "corpus/tokenizer.json").unlink()
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2 and "--tokenizer" in err
    assert not (tmp_path / "hf").exists()


def test_export_when_the_data_is_gone_still_checks_the_tokenizer(tmp_path: Path, monkeypatch, capsys) -> None:
    job = make_job(tmp_path)
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    own.write_bytes((tmp_path / "corpus/tokenizer.json").read_bytes())
    other.write_bytes(own.read_bytes() + b"\n")
    shutil.rmtree(tmp_path / "corpus")
    out = tmp_path / "hf"
    arguments = ("export", job.url, "latest", "--out", str(out), "--tokenizer")
    code, _, err = run(monkeypatch, capsys, *arguments, str(other))
    assert code == 2 and "tokenizer of the training data" in err and not out.exists()
    code, _, err = run(monkeypatch, capsys, *arguments, str(own))
    assert code == 0, err
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((out / "special_tokens_map.json").read_text()) == {"eos_token": "<|endoftext|>"}


def test_export_of_an_old_record_asks_the_data_and_refuses_without_it(tmp_path: Path, monkeypatch, capsys) -> None:
    job = make_job(tmp_path, is_old_record=True)
    own = tmp_path / "own.json"
    own.write_bytes((tmp_path / "corpus/tokenizer.json").read_bytes())
    arguments = ("export", str(job.file), "latest", "--tokenizer", str(own), "--out")
    code, _, err = run(monkeypatch, capsys, *arguments, str(tmp_path / "with-data"))
    assert code == 0, err
    assert "eos_token_id" in json.loads((tmp_path / "with-data/config.json").read_text())
    shutil.rmtree(tmp_path / "corpus")
    code, _, err = run(monkeypatch, capsys, *arguments, str(tmp_path / "without"))
    assert code == 2 and "too old to name its tokenizer" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "without").exists()


def test_export_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    store = file_store(tmp_path / "job")
    manifest = save(store, open_attempt(store), 5, [whole_of({f"model.{n}": torch.randn(1000) for n in range(9)})])
    key = "a00000001/s00000005/objects/00000000-00000000.safetensors"
    data = bytearray((tmp_path / "job" / key).read_bytes())
    data[-1] ^= 1
    (tmp_path / "job" / key).write_bytes(data)
    out = tmp_path / "exports/hf"
    with pytest.raises(DamagedObject, match=r"model\.8"):
        export(store, manifest, out, Target({}, lambda name: name, {}))
    assert list(out.parent.iterdir()) == []
    with pytest.raises(PhalanxError, match="nothing"):
        export(store, manifest, out, Target({}, _refusing, {}))


def _refusing(name: str) -> str | None:
    raise PhalanxError(name, expected="nothing", remedy="none")


def test_export_needs_memory_of_about_the_largest_tensor(tmp_path: Path) -> None:
    store = file_store(tmp_path / "job")
    tensors = {f"model.{n}": random_tensor((1 << 20,), torch.float32, n) for n in range(16)}
    manifest = save(store, open_attempt(store), 5, [whole_of(tensors)])
    tracemalloc.start()
    export(store, manifest, tmp_path / "hf", Target({}, lambda name: name, {}), dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * (4 << 20), "16 tensors of 4 MiB must not be in memory together"
