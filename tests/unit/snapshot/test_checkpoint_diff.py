"""`phalanx checkpoint diff` on real checkpoints: what changed, by how much, and what is read to say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from saved_job import file_store, open_attempt, random_tensor, rows_of, save, whole_of

from phalanx.checkpoint.diff import Comparison, Finding, Side, TensorDiff
from phalanx.cli.checkpoint import register
from phalanx.cli.errors import run_reporting_errors
from phalanx.lineage import Lineage
from phalanx.objects import ObjectStore
from phalanx.objects.faults import FaultyStore

Weights = Mapping[str, torch.Tensor]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {f"model.w{n}": torch.randn(40, 30, generator=generator) for n in range(4)}
    half = torch.randn(7, 9, generator=generator)
    return {**found, "model.half": half.bfloat16(), "model.count": torch.arange(12), "model.scalar": torch.tensor(2.0)}


def of(store: ObjectStore, step: int) -> Side:
    lineage = Lineage(store)
    return Side.of(store, lineage.manifest(next(ref for ref in lineage.checkpoints() if ref.step == step)))


def by_name(found: tuple[TensorDiff, ...]) -> dict[str, TensorDiff]:
    return {each.name: each for each in found}


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    monkeypatch.setattr("sys.argv", ["phalanx", "checkpoint", "diff", *arguments])
    code = run_reporting_errors(app)
    return code, *capsys.readouterr()


def test_diff_of_changed_tensors_gives_norms_in_float64(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt, a = open_attempt(store), weights()
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["model.w1"][3, 4] += 0.5
    b["model.half"] = a["model.half"] * 2
    b["model.count"] = a["model.count"] + 1
    save(store, attempt, 5, rows_of(a, 2))
    save(store, attempt, 10, rows_of(b, 3))
    found = by_name(Comparison(of(store, 5), of(store, 10)).run())
    changed = {name for name, each in found.items() if each.finding == Finding.CHANGED}
    assert changed == {"model.w1", "model.half", "model.count"}
    assert {each.finding for name, each in found.items() if name not in changed} == {Finding.UNCHANGED}
    for name in changed:
        x, y = a[name].double().numpy(), b[name].double().numpy()
        norms = found[name].norms
        assert norms is not None and norms.num_changed == np.count_nonzero(x != y)
        expected = (np.linalg.norm(x), np.linalg.norm(y), np.linalg.norm(x - y))
        assert (norms.a, norms.b, norms.difference) == pytest.approx(expected, rel=1e-14)
        assert norms.relative == pytest.approx(expected[2] / expected[0], rel=1e-14)


def test_diff_of_equally_cut_checkpoints_reads_only_what_changed(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt, a = open_attempt(store), {f"model.w{n}": random_tensor((700, 500), torch.float32, n) for n in range(4)}
    b = {**a, "model.w2": a["model.w2"].clone()}
    b["model.w2"][0, 0] = 1.0
    save(store, attempt, 5, rows_of(a, 2))
    save(store, attempt, 10, rows_of(b, 2))
    faulty = FaultyStore(store)
    comparison = Comparison(of(faulty, 5), of(faulty, 10))
    assert comparison.num_bytes == 2 * a["model.w2"].nbytes
    faulty.calls.clear()
    heard: list[int] = []
    changed = [each.name for each in comparison.run(heard.append) if each.finding == Finding.CHANGED]
    assert changed == ["model.w2"] and sum(heard) == comparison.num_bytes
    assert len(faulty.calls) == 4, "two boxes on each side"


def test_diff_of_nan_and_infinity_counts_bits(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    attempt = open_attempt(store)
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1.0])
    save(store, attempt, 5, [whole_of({"model.w": odd, "model.v": odd})])
    save(
        store,
        attempt,
        10,
        rows_of({"model.w": odd, "model.v": torch.tensor([float("nan"), float("inf"), 0.0, 1.0])}, 2),
    )
    found = by_name(Comparison(of(store, 5), of(store, 10)).run())
    assert found["model.w"].finding == Finding.UNCHANGED, "NaN has the same bits"
    norms = found["model.v"].norms
    assert norms is not None and (norms.num_changed, norms.difference) == (1, 0.0) and np.isnan(norms.a)


def test_diff_command_lists_every_kind_and_exits_as_asked(tmp_path: Path, monkeypatch, capsys) -> None:
    store = file_store(tmp_path / "a")
    attempt, a = open_attempt(store), weights()
    b = dict(a)
    del b["model.w0"]
    b |= {"model.new": torch.zeros(3), "model.w1": torch.zeros(2, 2), "model.w2": a["model.w2"].double()}
    b["model.w3"] = torch.zeros_like(a["model.w3"])
    save(store, attempt, 5, rows_of(a, 2))
    save(store, attempt, 10, rows_of(b, 2))
    code, out, err = run(monkeypatch, capsys, store.url, "5", "10", "--json")
    shown = json.loads(out)
    assert code == 0 and err == "" and shown["equal"] is False
    found = {row["name"]: row["finding"] for row in shown["tensors"]}
    assert found == {
        "model.w0": "only in A",
        "model.new": "only in B",
        "model.w1": "other shape",
        "model.w2": "other type",
        "model.w3": "changed",
    }
    assert shown["counts"]["unchanged"] == 3
    assert run(monkeypatch, capsys, store.url, "10", "5", "--exit-code")[0] == 1
    code, out, _ = run(monkeypatch, capsys, store.url, "5", "1/5", "--exit-code", "--all")
    assert code == 0 and "7 unchanged" in out and "model.scalar" in out
    code, out, _ = run(monkeypatch, capsys, store.url, "10", "5")
    assert code == 0 and "float32 [2, 2] -> float32 [40, 30]" in out and "model.scalar" not in out
    infinite = next(
        row
        for row in json.loads(run(monkeypatch, capsys, store.url, "10", "5", "--json")[1])["tensors"]
        if row["name"] == "model.w3"
    )
    assert infinite["norms"]["a"] == 0 and infinite["norms"]["relative"] is None


def test_diff_command_between_attempts_and_jobs(tmp_path: Path, monkeypatch, capsys) -> None:
    """A dead checkpoint is named by its attempt; another job by --other-job."""
    store, other = file_store(tmp_path / "a"), file_store(tmp_path / "b")
    first, a = open_attempt(store), weights()
    save(store, first, 5, rows_of(a, 2))
    dead = save(store, first, 10, rows_of(a, 2))
    second = open_attempt(store, avoid=[dead.ref])
    save(store, second, 10, rows_of({**a, "model.scalar": torch.tensor(3.0)}, 2))
    save(other, open_attempt(other), 7, [whole_of(a)])
    code, out, _ = run(monkeypatch, capsys, store.url, "1/10", "10", "--json")
    assert code == 0 and [row["name"] for row in json.loads(out)["tensors"]] == ["model.scalar"]
    assert json.loads(out)["a"] == {"attempt": 1, "step": 10} and json.loads(out)["b"] == {"attempt": 2, "step": 10}
    code, out, _ = run(monkeypatch, capsys, store.url, "5", "latest", "--other-job", other.url, "--json")
    assert code == 0 and json.loads(out)["equal"] is True
    for wrong in ("1/7", "x", "0/5", "1/", "3"):
        code, _, err = run(monkeypatch, capsys, store.url, "5", wrong)
        assert code == 2 and len(err.splitlines()) == 1, wrong
    assert list((tmp_path / "a/leases").rglob("*.json")) == [], "leases are taken back"


def test_diff_of_a_damaged_checkpoint_names_it_and_compares_the_rest(tmp_path: Path, monkeypatch, capsys) -> None:
    """Case 7."""
    store = file_store(tmp_path)
    attempt, a = open_attempt(store), weights()
    b = {name: (tensor + 1 if name.startswith("model.w") else tensor) for name, tensor in a.items()}
    save(store, attempt, 5, [whole_of(a)])
    save(store, attempt, 10, [whole_of(b)])
    path = tmp_path / "a00000001/s00000010/objects/00000000-00000000.safetensors"
    data = bytearray(path.read_bytes())
    at = bytes(data).find(b["model.w2"].numpy().tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    code, out, _ = run(monkeypatch, capsys, store.url, "5", "10", "--json")
    shown = {row["name"]: row for row in json.loads(out)["tensors"]}
    assert code == 1 and shown["model.w2"]["finding"] == "damaged"
    assert (
        str(path.relative_to(tmp_path)) in shown["model.w2"]["damage"]
        and "model.w2, chunk 0" in shown["model.w2"]["damage"]
    )
    assert [shown[f"model.w{n}"]["finding"] for n in (0, 1, 3)] == ["changed"] * 3
    code, out, _ = run(monkeypatch, capsys, store.url, "5", "10")
    assert code == 1 and "1 damaged" in out
