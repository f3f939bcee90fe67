"""What this version's trainer refuses before a rank starts, and the digest of its code."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.spec import Job, parse_job
from phalanx.trainer.code import code_digest
from phalanx.trainer.own_checks import check_own
from phalanx.trainer.preflight import Prepared, from_arguments, prepare, to_arguments

TABLES: dict[str, dict[str, Any]] = {
    "job": {"name": "preflight", "storage": "memory://preflight"},
    "model": {"preset": "tiny"},
    "data": {"train": "memory://nothing/train"},
    "training": {"seq_len": 32, "steps": 4, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
}


def job_with(section: str, **changes: Any) -> Job:
    """The tables with keys of one section changed."""
    return parse_job({**TABLES, section: {**TABLES.get(section, {}), **changes}})


REFUSALS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "dropout": ("model", {"args": {"dropout": 0.1}}, 1, "model.args.dropout is 0.1: expected 0"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_prepare_refuses_what_is_not_built_by_its_key(what: str) -> None:
    section, changes, world_size, line = REFUSALS[what]
    with pytest.raises(PhalanxError) as refusal:
        prepare(job_with(section, **changes), world_size)
    assert str(refusal.value).startswith(line)
    assert "`phalanx run` does not yet" in str(refusal.value)


def test_fp8_without_torchao_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    line = r"^training\.float8_recipe is 'rowwise': expected none, or the library torchao; install phalanx\[fp8\]"
    with pytest.raises(PhalanxError, match=line):
        prepare(job_with("training", float8_recipe="rowwise"), 1)


def test_prepare_of_a_missing_split_names_the_key_and_makes_no_job(tmp_path: Path) -> None:
    tables = {**TABLES, "job": {"name": "preflight", "storage": tmp_path.as_uri()}}
    with pytest.raises(PhalanxError, match=r"data\.train at memory://nothing/train: .*phalanx data prepare"):
        prepare(parse_job(tables), 1)
    assert not list(tmp_path.iterdir())


def test_arguments_of_a_rank_are_plain_json_and_come_back_whole() -> None:
    job = job_with("parallel", tp=2)
    prepared = Prepared(job, job.layout(4), "sha256:i", "sha256:p", "sha256:c")
    assert from_arguments(json.loads(json.dumps(to_arguments(prepared)))) == prepared


def test_arguments_that_an_earlier_version_prepared_are_read() -> None:
    job = job_with("parallel", tp=2)
    prepared = Prepared(job, job.layout(4), "sha256:i", "sha256:p", "sha256:c")
    arguments = json.loads(json.dumps(to_arguments(prepared)))
    del arguments["chosen"], arguments["job"]["parallel"]["layout"]
    assert from_arguments(arguments) == prepared


def test_arguments_of_a_users_class_come_back_whole() -> None:
    model = {"class": "somewhere:Model", "args": {"width": 3, "names": ["a"], "rate": 0.5}}
    job = parse_job({**TABLES, "model": model})
    prepared = Prepared(job, job.layout(1), "sha256:i", "sha256:p", "sha256:c")
    assert from_arguments(json.loads(json.dumps(to_arguments(prepared)))) == prepared


def test_code_digest_is_the_same_in_another_process() -> None:
    program = "from phalanx.trainer.code import code_digest; print(code_digest())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == code_digest() == code_digest()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", code_digest())


@pytest.mark.parametrize("is_package", [True, False])
def test_code_digest_covers_the_users_own_code(
    is_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_code_{'package' if is_package else 'module'}"
    helper = tmp_path / name / "helper.py" if is_package else tmp_path / f"{name}.py"
    helper.parent.mkdir(exist_ok=True)
    if is_package:
        (tmp_path / name / "__init__.py").touch()
    helper.write_text("width = 1\n")
    importlib.import_module(name)
    class_ = f"{name}:Model"
    first = code_digest(class_)
    assert first == code_digest(class_) != code_digest()
    helper.write_text("width = 2\n")
    assert code_digest(class_) != first


def test_code_digest_of_a_large_package_covers_the_module_alone(caplog: pytest.LogCaptureFixture) -> None:
    import torch.nn

    assert torch.nn.Linear is not None
    assert code_digest("torch.nn:Linear") != code_digest("torch.fx:Graph")
    assert "package torch is large" in caplog.text


@pytest.mark.parametrize(
    ("class_", "told"),
    [("json:JSONDecoder", "torch.nn.Module"), ("json:dumps", "torch.nn.Module"), ("json:X", "importable")],
)
def test_prepare_refuses_a_class_that_is_no_module(class_: str, told: str) -> None:
    job = parse_job({**TABLES, "model": {"class": class_, "args": {}}})
    with pytest.raises(PhalanxError, match=rf"model\.class is '{class_}': expected .*{told}"):
        check_own(job, job.layout(1))


@pytest.mark.parametrize("layout", [{"tp": 8}, {"tp": 8, "pp": 4, "schedule": "1f1b"}])
def test_prepare_of_16384_ranks_goes_on_to_the_data(layout: dict[str, Any]) -> None:
    """The root of a checkpoint stays small in any world."""
    tables = {**TABLES, "model": {"preset": "tiny", "args": {"n_heads": 8, "n_kv_heads": 8, "n_layers": 8}}}
    job = parse_job({**tables, "parallel": layout, "training": {**TABLES["training"], "global_batch_size": 4096}})
    with pytest.raises(PhalanxError, match=r"data\.train"):
        prepare(job, 16384)


def test_preflight_loads_no_torch() -> None:
    program = "import sys, phalanx.trainer.preflight, phalanx.trainer.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
