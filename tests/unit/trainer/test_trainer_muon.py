"""Muon on one process: the iteration against an SVD, the update against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core.box import HeldTensor, whole
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job, parse_job
from phalanx.trainer.muon import orthogonal
from phalanx.trainer.optimizer import Optimizer, optimizer_of

LR, DECAY = 0.02, 0.1
SHAPES = {
    "tok_embeddings.weight": (12, 8),
    "layers.0.attention.wq.weight": (8, 8),
    "layers.0.feed_forward.w1.weight": (20, 8),
    "layers.0.feed_forward.w2.weight": (8, 20),
    "layers.0.ffn_norm.weight": (8,),
    "output.weight": (12, 8),
}
HIDDEN = [name for name, shape in SHAPES.items() if name.startswith("layers.") and len(shape) == 2]


def _job(**optimizer: object) -> Job:
    return parse_job(
        {
            "job": {"name": "muon", "storage": "memory://muon"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://muon/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1, "max_norm": 0.0},
            "optimizer": {"name": "muon", "lr": LR, "weight_decay": DECAY, **optimizer},
        }
    )


def _drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _held() -> list[HeldTensor]:
    return [HeldTensor(name, tuple(each.shape), whole(tuple(each.shape)), each) for name, each in _drawn(0).items()]


def made(job: Job, held: list[HeldTensor]) -> Optimizer:
    return optimizer_of(job, held, ReplicaLink(None))


def _step(optimizer: Optimizer, step: int) -> None:
    optimizer.update(list(_drawn(step).values()), 1.0, 1.0)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(2, 24),
    columns=st.integers(2, 24),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_update_keeps_singular_vectors_and_levels_singular_values(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    left = torch.linalg.qr(torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed)))[0]
    right = torch.linalg.qr(torch.randn(columns, columns, generator=torch.Generator().manual_seed(seed + 1)))[0]
    rank = min(rows, columns)
    values = torch.linspace(0.3, 1.0, rank) * scale
    found = orthogonal(left[:, :rank] * values @ right[:rank], 5, torch.float32)
    between = left[:, :rank].t() @ found @ right[:rank].t()
    assert found.shape == (rows, columns)
    assert between.diagonal().min() > 0.6 and between.diagonal().max() < 1.3
    assert (between - between.diagonal().diag()).abs().max() < 1e-3


def test_a_gradient_of_zeros_updates_nothing() -> None:
    assert not orthogonal(torch.zeros(3, 5), 5, torch.float32).any()


def test_hidden_matrices_follow_torchs_muon_and_the_rest_torchs_adamw() -> None:
    held = _held()
    optimizer = made(_job(), held)
    theirs = {name: torch.nn.Parameter(each.clone()) for name, each in _drawn(0).items()}
    muon = torch.optim.Muon(
        [theirs[name] for name in HIDDEN], lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    rest = [name for name in SHAPES if name not in HIDDEN]
    groups = [{"params": [theirs[name]], "weight_decay": DECAY if len(SHAPES[name]) > 1 else 0.0} for name in rest]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in (1, 2, 3):
        _step(optimizer, step)
        for name, gradient in _drawn(step).items():
            theirs[name].grad = gradient
        muon.step()
        adamw.step()
    for each in held:
        # torch's iteration runs in bfloat16.
        bound = 0.05 * LR if each.name in HIDDEN else 1e-6
        assert (each.local - theirs[each.name].detach()).abs().max() < bound, each.name


def test_gradients_are_clipped_together() -> None:
    clipped, scaled, job = _held(), _held(), _job()
    clips = job.model_copy(update={"training": job.training.model_copy(update={"max_norm": 1.0})})
    made(clips, clipped).update([4 * each for each in _drawn(1).values()], 4.0 - 1e-6, 1.0)
    _step(made(job, scaled), 1)
    for one, other in zip(clipped, scaled, strict=True):
        torch.testing.assert_close(one.local, other.local, rtol=1e-5, atol=1e-6)


def test_state_is_one_momentum_of_hidden_matrices_and_two_moments_of_the_rest() -> None:
    optimizer = made(_job(), _held())
    names = {each.name for each in optimizer.state()}
    assert names == set(optimizer.state_names(SHAPES))
    assert {name for name in names if name.endswith(".momentum")} == {f"optim.{name}.momentum" for name in HIDDEN}
    assert len(names) == len(HIDDEN) + 2 * (len(SHAPES) - len(HIDDEN))


@pytest.mark.parametrize("start", [1, 2])
def test_resumed_state_goes_on_with_the_same_bits(start: int) -> None:
    straight, resumed = _held(), _held()
    one, other = made(_job(), straight), made(_job(), resumed)
    for step in range(1, start + 1):
        _step(one, step)
    for mine, theirs in zip([*resumed, *other.state()], [*straight, *one.state()], strict=True):
        assert mine.name == theirs.name
        mine.local.detach().copy_(theirs.local.detach())
    other.resume({"num_updates": start})
    _step(one, start + 1)
    _step(other, start + 1)
    assert other.num_updates == one.num_updates == start + 1
    assert all(torch.equal(a.local, b.local) for a, b in zip(straight, resumed, strict=True))
