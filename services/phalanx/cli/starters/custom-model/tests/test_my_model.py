"""Run them with `python -m pytest`, from the folder of job.toml; they take seconds and need no data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from my_model.model import MyModel
from my_model.objective import accuracy, loss

from phalanx.spec import load_job
from phalanx.trainer.own_checks import check_own

JOB = Path(__file__).parents[1] / "job.toml"
VOCAB_SIZE, SHAPE = 50, (3, 12)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and document numbers of windows that hold two documents each."""
    tokens = torch.randint(0, VOCAB_SIZE, SHAPE, generator=torch.Generator().manual_seed(1))
    index = torch.arange(SHAPE[1]).expand(SHAPE)
    return tokens, index % 6, index // 6


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, []), (4, ["dp_replicate=2", "zero=1"]), (4, ["tp=2"]), (4, ["pp=2", "tp=2"])],
)
def test_layout_is_one_that_the_model_can_run_in(world_size: int, layout: list[str]) -> None:
    """What Phalanx itself checks before a job starts: layout, methods, loss, metrics, optimizer."""
    job = load_job(JOB, [f"parallel.{each}" for each in layout])
    check_own(job, job.layout(world_size))


def test_tokens_see_earlier_tokens_of_their_own_document_only() -> None:
    model = MyModel(VOCAB_SIZE)
    tokens, positions, documents = batch()
    before = model(tokens, positions, documents)
    tokens[:, 5] = (tokens[:, 5] + 1) % VOCAB_SIZE  # the last token of each first document
    after = model(tokens, positions, documents)
    changed = (before - after).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [index == 5 for index in range(SHAPE[1])]


def test_stages_one_after_the_other_are_the_model() -> None:
    model = MyModel(VOCAB_SIZE)
    x, positions, documents = batch()
    expected = model(x, positions, documents)
    for stage in model.split_stages(3):
        x = stage(x, positions, documents)
    torch.testing.assert_close(x, expected)


def test_model_learns_a_batch_by_heart() -> None:
    torch.manual_seed(1)
    model = MyModel(VOCAB_SIZE, num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, positions, documents = batch()
    targets = torch.where(positions == 5, -100, tokens.roll(-1, dims=1))
    for _ in range(60):
        value = loss(model(tokens, positions, documents), targets, z_weight=1e-4) / (targets != -100).sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert accuracy(model(tokens, positions, documents), targets) > 0.9 * (targets != -100).sum()
