"""Mixtures of experts trained as a run trains them: over restarts in other layouts, with biases that move, exported."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from support.jobs import assert_proven, lineage_of, losses_of, newest_tensors, run_cli, run_here, write_job

from phalanx.gang import ForkServer
from phalanx.lineage import StepRows

DEEPSEEK = (
    "model.args.moe.score=sigmoid",
    "model.args.moe.num_shared_experts=1",
    "model.args.moe.selection_bias=true",
    "model.args.moe.bias_update_rate=0.01",
    "model.args.moe.aux_loss=0.01",
)
LAYOUTS = (
    ("cluster.nproc=1", "parallel.local_batch_size=8"),
    ("cluster.nproc=2",),
    ("cluster.nproc=4", "parallel.tp=2", "parallel.local_batch_size=2"),
    ("cluster.nproc=2", "parallel.pp=2", "parallel.local_batch_size=2", "activation_checkpoint.mode=full"),
)


def _job(folder: Path, corpus: str, preset: str, steps: int) -> Path:
    folder.mkdir()
    path = write_job(folder, corpus, steps=steps)
    path.write_text(path.read_text().replace('preset = "tiny"', f'preset = "{preset}"'))
    return path


def _rows(path: Path) -> StepRows:
    """The step rows of the live chain, by step."""
    rows = StepRows.concatenate([steps for _, steps in lineage_of(path).records.live()])
    order = np.argsort(rows.step)
    return StepRows(**{each.name: getattr(rows, each.name)[order] for each in fields(rows)})


def test_experts_with_moving_biases_go_on_in_other_layouts_with_the_losses_of_one_process(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    whole, moved = (_job(tmp_path / name, corpus, "mixtral-tiny", 8) for name in ("whole", "moved"))
    run_here(whole, server, *LAYOUTS[0], *DEEPSEEK)
    for number, layout in enumerate(LAYOUTS):
        run_here(moved, server, *layout, *DEEPSEEK, f"training.steps={2 * number + 2}")
    expected, found = losses_of(whole), losses_of(moved)
    assert expected.keys() == found.keys() and len(found) == 8
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step
    one, many = _rows(whole), _rows(moved)
    for name in ("expert_worst", "expert_mean", "expert_idle"):
        np.testing.assert_array_equal(getattr(one, name), getattr(many, name), err_msg=name)
    np.testing.assert_allclose(one.balance_loss, many.balance_loss, rtol=1e-5)
    assert (one.expert_worst >= one.expert_mean).all() and (one.expert_mean >= 1).all()
    assert (one.balance_loss > 0.01 * 2 * 0.9).all(), "aux_loss times about 1 for each of two layers"
    ours, theirs = newest_tensors(moved), newest_tensors(whole)
    for layer in range(2):
        bias = ours[f"model.layers.{layer}.feed_forward.router.selection_bias"]
        np.testing.assert_array_equal(bias, theirs[f"model.layers.{layer}.feed_forward.router.selection_bias"])
        assert bias.dtype == np.float32 and bias.any()
        steps = bias / 0.01
        np.testing.assert_allclose(steps, steps.round(), atol=1e-4, err_msg="eight steps of the update rate")
        assert np.abs(steps).max() <= 8
    assert_proven(moved, 8, *DEEPSEEK)


@pytest.mark.parametrize("preset", ["mixtral-tiny", "qwen3-moe-tiny"])
def test_a_run_of_experts_tells_their_load_and_exports_to_transformers(
    corpus: str, tmp_path: Path, preset: str
) -> None:
    transformers = pytest.importorskip("transformers")
    path = _job(tmp_path / "job", corpus, preset, 4)
    done = run_cli(["run", path, "--json", "--set", "model.args.moe.aux_loss=0.02"])
    assert done.code == 0, done.err
    assert json.loads(done.out)["final_loss"] < json.loads(done.out)["first_loss"]
    assert "busiest expert 1." in done.err or "busiest expert 2." in done.err
    rows = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    loads = [row["experts/worst"] for row in rows if "experts/worst" in row]
    assert len(loads) == 4 and all(1.0 <= load <= 8.0 for load in loads)
    balances = [row["experts/balance_loss"] for row in rows if "experts/balance_loss" in row]
    np.testing.assert_allclose(balances, _rows(path).balance_loss, rtol=1e-6)
    assert f"balance loss {balances[-1]:.4f}" in done.err
    exported = run_cli(["checkpoint", "export", path, "latest", "--out", tmp_path / "hf"])
    assert exported.code == 0, exported.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(32)[None]).logits).all()
