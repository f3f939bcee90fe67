"""MFU by the formula of docs/mfu.md, and its way into a run's metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.planner.mfu import mfu_of
from phalanx.spec import load_job
from phalanx.trainer.figures import Figures

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ON_GPUS = ("cluster.gpu=H100-80", "cluster.nproc=8", "cluster.nodes=8")


def test_mfu_of_a_dense_model_is_six_operations_a_weight_and_attention_once():
    """Llama 3 8B, 8,192 tokens a window: every product written out by hand."""
    job = load_job(EXAMPLES / "8b-64gpu.toml", [*ON_GPUS, "training.seq_len=8192"])
    projections, feed_forward, head = 4096 * (4096 + 2 * 1024 + 4096), 3 * 4096 * 14336, 4096 * 128256
    attention = 32 * 12 * 4096 * (8192 + 1) / 2
    per_token = 6 * (32 * (projections + feed_forward) + head) + attention
    of_job = mfu_of(job)
    assert of_job is not None
    assert of_job(400_000) == pytest.approx(per_token * 400_000 / (64 * 989e12), rel=1e-9)


def test_mfu_does_not_change_with_recompute_or_precision():
    found = set()
    for setting in ("activation_checkpoint.mode=none", "activation_checkpoint.mode=full"):
        of_job = mfu_of(load_job(EXAMPLES / "8b-64gpu.toml", [*ON_GPUS, setting]))
        assert of_job is not None
        found.add(of_job(1000.0))
    assert len(found) == 1


@pytest.mark.parametrize("settings", [["cluster.device=cpu"], ["cluster.device=cuda", "cluster.gpu_memory_gib=48"]])
def test_mfu_where_nobody_knows_the_peak_is_none(settings: list[str]):
    assert mfu_of(load_job(EXAMPLES / "small-cpu.toml", settings)) is None


def test_mfu_of_an_unknown_kind_of_gpu_is_refused():
    with pytest.raises(PhalanxError, match=r"cluster\.gpu"):
        mfu_of(load_job(EXAMPLES / "8b-64gpu.toml", ["cluster.gpu=H101"]))


@pytest.mark.parametrize(("example", "has_mfu"), [("8b-64gpu.toml", True), ("small-cpu.toml", False)])
def test_figures_of_a_step_hold_mfu_where_it_is_known(tmp_path: Path, example: str, has_mfu: bool):
    gpus = list(ON_GPUS) if has_mfu else []
    job = load_job(EXAMPLES / example, [*gpus, f"metrics.folder={tmp_path}"])
    fields = {"loss": 2.0, "gradient_norm": 1.0, "lr": 1e-3, "step_time_s": 2.0, "data_wait_s": 0.0}
    with Figures(job) as figures:
        figures.observe("progress", {"step": 1, "tokens": 1_000_000, **fields})
    rows = [json.loads(line) for line in (tmp_path / job.job.name / "metrics.jsonl").read_text().splitlines()]
    assert [("speed/mfu" in row) for row in rows] == [has_mfu]
    if has_mfu:
        of_job = mfu_of(job)
        assert of_job is not None and rows[0]["speed/mfu"] == pytest.approx(of_job(500_000.0))
