"""Mixtures of experts trained as a run trains them: over restarts in other layouts, with biases that move, exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.jobs import assert_proven, losses_of, newest_tensors, run_cli, run_here, write_job

from phalanx.gang import ForkServer

DEEPSEEK = (
    "model.args.moe.score=sigmoid",
    "model.args.moe.num_shared_experts=1",
    "model.args.moe.selection_bias=true",
    "model.args.moe.bias_update_rate=0.01",
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
    done = run_cli(["run", path, "--json"])
    assert done.code == 0, done.err
    assert json.loads(done.out)["final_loss"] < json.loads(done.out)["first_loss"]
    assert "busiest expert 1." in done.err or "busiest expert 2." in done.err
    rows = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    loads = [row["experts/worst"] for row in rows if "experts/worst" in row]
    assert len(loads) == 4 and all(1.0 <= load <= 8.0 for load in loads)
    exported = run_cli(["checkpoint", "export", path, "latest", "--out", tmp_path / "hf"])
    assert exported.code == 0, exported.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(32)[None]).logits).all()
