"""What ranks know together of experts: weights of windows, loads, and the bias that follows from counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from phalanx.models.args import MoeShape
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Router
from phalanx.parallel.build import build_on_meta
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.routing import Routing, window_weights
from phalanx.spec import Job, parse_job
from phalanx.trainer.expert_figures import expert_load


def make_plain_job(model: dict[str, Any]) -> Job:
    """A job of that model."""
    return parse_job(
        {
            "job": {"name": "routing", "storage": "memory://routing"},
            "model": model,
            "data": {"train": "memory://routing/train"},
            "training": {"seq_len": 16, "steps": 1, "global_batch_size": 8},
            "optimizer": {"lr": 1e-3},
        }
    )


def _routing(**moe: Any) -> Routing:
    shape = MoeShape(4, 1, 8, **moe)
    mesh = cast("Mesh", SimpleNamespace(device=torch.device("cpu"), groups={}))
    return Routing({1: Router(8, shape)}, 3, 4, mesh)


def test_window_weights_are_the_parts_of_the_valid_tokens_and_of_a_surplus_window_nothing() -> None:
    targets = torch.tensor([[1, 2, -100, 4], [-100] * 4, [5, -100, -100, -100]])
    assert window_weights(targets, 8).tolist() == [0.375, 0.0, 0.125]


def test_biases_rise_where_experts_had_less_than_the_mean_and_fall_where_they_had_more() -> None:
    routing = _routing(selection_bias=True, bias_update_rate=0.5)
    bias = routing.routers[1].selection_bias
    assert bias is not None
    counts = torch.tensor([[9, 9, 9, 9], [0, 3, 5, 4], [0, 0, 0, 9]])
    routing.move_biases(counts)
    assert bias.tolist() == [0.5, 0.0, -0.5, -0.5]
    routing.move_biases(counts)
    assert bias.tolist() == [1.0, 0.0, -1.0, -1.0]


def test_biases_of_a_rate_of_zero_stay_and_routers_without_one_need_none() -> None:
    routing = _routing(selection_bias=True, bias_update_rate=0.0)
    routing.move_biases(torch.ones(3, 4, dtype=torch.int64))
    bias = routing.routers[1].selection_bias
    assert bias is not None and not bias.any()
    _routing().move_biases(torch.ones(3, 4, dtype=torch.int64))


def test_counts_lie_in_their_layer_and_are_taken_once() -> None:
    routing = _routing(aux_loss=0.1)
    _, weights = routing.routers[1](torch.randn(2, 5, 8), torch.tensor([0.5, 0.5]))
    weights.sum().backward()
    counts, balance_loss = routing.take()
    assert counts.sum(1).tolist() == [0, 10, 0]
    assert 0.1 <= balance_loss <= 0.4, "aux_loss times a figure from 1 to E"
    counts, balance_loss = routing.take()
    assert not counts.any() and not balance_loss


def test_a_stage_without_routers_counts_nothing_and_takes_part_in_the_sum() -> None:
    moe = {"first_k_dense": 2, "num_experts": 8}
    args = {"n_layers": 3, "moe": moe}
    job = make_plain_job({"preset": "deepseek-v3-tiny", "args": args})
    whole = build_on_meta(job)
    assert isinstance(whole, Decoder)
    first, last = whole.split_layers((2, 1))
    mesh = _routing().mesh
    for stage, layers in ((first, []), (last, [2])):
        routing = Routing.of([stage], mesh, job)
        assert routing is not None and list(routing.routers) == layers
        counts, balance_loss = routing.take()
        assert counts.shape == (3, 8) and not counts.any() and not balance_loss
    assert Routing.of([first], mesh, make_plain_job({"preset": "tiny"})) is None


def test_load_is_told_of_the_layers_with_experts_alone() -> None:
    job = make_plain_job({"preset": "deepseek-v3-tiny"})
    counts = torch.tensor([[0] * 8, [2] * 8, [4, 0] * 4])
    load = expert_load(job, counts, 0.5)
    assert (load.worst, load.mean, load.idle) == (2.0, 1.5, 0.25)
