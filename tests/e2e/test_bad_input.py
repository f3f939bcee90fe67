"""Mistakes of the user: one clear line each with key, value and remedy, exit 2, nothing made in storage."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.jobs import job_folder, run_cli, run_here, user_job, write_job

from phalanx.cli.main import main
from phalanx.gang import ForkServer

WRONG_DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True)
class Mistake:
    """overrides: of the tiny job on two ranks; `{data}` is the prepared corpus. edit: (old, new) text of the job file.
    lines: what each line on stderr must say.
    """

    lines: tuple[tuple[str, ...], ...]
    overrides: tuple[str, ...] = ()
    edit: tuple[str, str] = ("", "")


MISTAKES = {
    "misspelt keys": Mistake(
        (("training.stepps", "6", "did you mean training.steps?"), ("optimizer.rl", "0.001", "optimizer.lr")),
        edit=("steps = 6", "stepps = 6"),
        overrides=("optimizer.rl=0.001",),
    ),
    "unknown key": Mistake((("training.colour", "'red'", "expected a key"),), ('training.colour="red"',)),
    "another system's name": Mistake((("train_iters", "training.steps"),), ("training.train_iters=5",)),
    "sizes that do not multiply to the world": Mistake(
        (("parallel", "dp_shard 3", "multiply to the 2 ranks", "change a size"),), ("parallel.dp_shard=3",)
    ),
    "sizes that do not divide the world": Mistake(
        (("parallel", "tp 2", "divides the 3 ranks", "change a size"),), ("parallel.tp=2", "cluster.nproc=3")
    ),
    "heads not divisible by tp": Mistake(
        (
            ("parallel.tp is 3", "n_kv_heads = 2, or a multiple", "change parallel.tp"),
            ("parallel.tp is 3", "n_heads = 4", "change"),
            ("parallel.tp is 3", "vocab_size = 512", "change"),
        ),
        ("parallel.tp=3", "cluster.nproc=3", "training.seq_len=33"),
    ),
    "sequence length not divisible by tp x cp": Mistake(
        (("training.seq_len is 33", "tp x cp = 2", "use 34"),), ("parallel.tp=2", "training.seq_len=33")
    ),
    "more stages than layers": Mistake(
        (("parallel.pp is 4", "at most 2 stages", "lower pp"),), ("parallel.pp=4", "cluster.nproc=4")
    ),
    "vocabulary smaller than the tokenizer's": Mistake(
        (("model.args.vocab_size is 200", "300 tokens", "300 or more"),), ("model.args.vocab_size=200",)
    ),
    "a split that is missing": Mistake(
        (("data.train", "{data}/nowhere", "manifest.json", "phalanx data prepare"),), ('data.train="{data}/nowhere"',)
    ),
    "a store without permission": Mistake(
        (("/sys/phalanx", "may use", "change its permissions"),), ('job.storage="file:///sys/phalanx"',)
    ),
    "not TOML": Mistake((("job.toml", "TOML", "line 10", "correct that line"),), edit=("seq_len = 32", "seq_len 32")),
    "an unknown dataset digest": Mistake(
        (("data.train_digest", WRONG_DIGEST, "correct the URL"),), (f'data.train_digest="{WRONG_DIGEST}"',)
    ),
    "a held-out digest that is wrong": Mistake(
        (("data.held_out_digest", WRONG_DIGEST, "correct the URL"),),
        (f'data.held_out_digest="{WRONG_DIGEST}"', "validation.freq=2"),
    ),
    "a held-out manifest given for training": Mistake(
        (("data.train", "{data}/held_out", "training split", "held out for evaluation"),),
        ('data.train="{data}/held_out"', 'data.held_out="{data}/train"'),
    ),
    "a training manifest given for evaluation": Mistake(
        (("data.held_out", "held out at preparation", "held_out folder"),),
        ('data.held_out="{data}/train/"', 'data.train="{data}/./train"', "validation.freq=2"),
    ),
    "a class that is not there": Mistake(
        (("model.class", "nowhere:Model", "importable", "install it"),), ('model.class="nowhere:Model"',)
    ),
    "no GPUs here": Mistake(
        (("cluster.device is 'cuda'", "2 GPUs", "torch finds 0", 'cluster.device = "cpu"'),),
        ('cluster.device="cuda"',),
    ),
    "storage that dies with the process": Mistake(
        (("job.storage is 'memory://x'", "outlives them", "s3://"),), ('job.storage="memory://x"',)
    ),
    "a metrics folder that is a file": Mistake(
        (("metrics.folder is '/proc/self/status'", "can be written", "name another one"),),
        ('metrics.folder="/proc/self/status"',),
    ),
    "several mistakes at once": Mistake(
        (("training.seq_len",), ("optimizer.lr",), ("checkpoint.when_busy", "wait", "skip")),
        ("optimizer.lr=-1", "training.seq_len=0", 'checkpoint.when_busy="sometimes"'),
    ),
}


def told(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr of `phalanx ARGUMENTS...`, run in this process, which must exit 2 and print nothing else."""
    monkeypatch.setattr(sys, "argv", ["phalanx", *arguments])
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as ending:
        main()
    out, err = capfd.readouterr()
    assert ending.value.code == 2, err
    assert out == "" and "Traceback" not in err
    return err.splitlines()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told_in_one_line_with_its_remedy_and_nothing_is_made(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    mistake = MISTAKES[name]
    path = write_job(tmp_path, corpus)
    path.write_text(path.read_text().replace(*mistake.edit) if mistake.edit[0] else path.read_text())
    overrides = [word for each in mistake.overrides for word in ("--set", each.format(data=corpus))]
    lines = told(["run", str(path), *overrides], monkeypatch, capfd)
    assert len(lines) == len(mistake.lines), lines
    for line, wanted in zip(lines, mistake.lines, strict=True):
        assert all(fragment.format(data=corpus) in line for fragment in wanted), (line, wanted)
    assert lines[0].startswith("phalanx: ")
    assert sorted(tmp_path.iterdir()) == [path]


def test_vocabulary_of_an_own_model_is_compared_with_the_tokenizers(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = user_job(tmp_path, corpus, "Bigram")
    (line,) = told(["run", str(path), "--set", "model.args.vocab_size=200"], monkeypatch, capfd)
    assert line.startswith("phalanx: model.args.vocab_size is 200: expected at least the tokenizer's 300 tokens; set")


@pytest.mark.parametrize(("name", "wanted"), [("empty", "it holds none"), ("missing", "nothing is there")])
def test_corpus_folder_that_holds_nothing_is_told_in_one_line_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, wanted: str
) -> None:
    (tmp_path / "empty").mkdir()
    out = (tmp_path / "data").as_uri()
    (line,) = told(["data", "prepare", str(tmp_path / name), "--out", out], monkeypatch, capfd)
    assert str(tmp_path / name) in line and wanted in line and "check the path" in line
    assert not (tmp_path / "data").exists()


IDENTITY_CHANGES = {
    "optimizer.lr=0.5": "optimizer.lr",
    "training.seed=7": "training.seed",
    "model.args.dim=32": "model.args.dim",
    "training.global_batch_size=4": "training.global_batch_size",
}


@pytest.mark.parametrize("change", IDENTITY_CHANGES)
def test_checkpoint_of_another_identity_is_refused_by_the_keys_that_differ(
    corpus: str,
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    change: str,
) -> None:
    path = write_job(tmp_path, corpus)
    run_here(path, server, "training.steps=1")
    before = sorted(job_folder(path).rglob("*"))
    (line,) = told(["run", str(path), "--set", change], monkeypatch, capfd)
    assert IDENTITY_CHANGES[change] in line and "(was " in line and "another [job] name" in line
    assert sorted(job_folder(path).rglob("*")) == before


def test_bad_input_under_the_real_command_exits_2_and_leaves_nothing(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus)
    finished = run_cli(["run", path, "--set", "model.args.vocab_size=200"])
    assert finished.code == 2 and finished.out == ""
    (line,) = finished.err.splitlines()
    assert line.startswith("phalanx: model.args.vocab_size is 200")
    assert sorted(tmp_path.iterdir()) == [path]
