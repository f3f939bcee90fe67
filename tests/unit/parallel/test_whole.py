"""Ranks that hold the model whole: what is allocated, what travels together, and when it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.parallel.whole import ReplicaSums, buckets_of, is_whole, materialise_whole
from phalanx.spec.load import parse_job


def _job(world_size: int, dtype: str = "float32", device: str = "cpu", **parallel: Any) -> Any:
    return parse_job(
        {
            "job": {"name": "whole", "storage": "memory://whole"},
            "model": {"args": {"dim": 16, "n_layers": 2, "n_heads": 4, "ffn_dim": 32, "vocab_size": 64}},
            "data": {"train": "memory://whole/train"},
            "training": {"seq_len": 16, "steps": 1, "global_batch_size": 8, "mixed_precision_param": dtype},
            "optimizer": {"lr": 0.1},
            "parallel": {"local_batch_size": 1, **parallel},
            "cluster": {"nproc": world_size, "device": device},
        }
    )


@pytest.mark.parametrize(
    ("world_size", "keys", "expected"),
    [
        (1, {}, True),
        (1, {"dtype": "bfloat16"}, False),
        (1, {"cpu_offload": True}, False),
        (2, {}, False),
        (2, {"tp": 2}, True),
        (2, {"pp": 2}, False),
        (2, {"cp": 2}, False),
        (2, {"dp_replicate": 2, "dp_shard": 1, "zero": 1}, True),
        (2, {"dp_replicate": 2, "dp_shard": 1, "zero": 2}, False),
        (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, False),
    ],
)
def test_only_what_has_one_part_and_one_type_is_held_whole(
    world_size: int, keys: dict[str, Any], expected: bool
) -> None:
    job = _job(world_size, **keys)
    assert is_whole(job, job.layout(world_size)) is expected


def test_a_parameter_of_two_names_stays_one_and_buffers_are_allocated() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.last.weight = self.first.weight
            self.register_buffer("table", torch.zeros(2), persistent=False)

    with torch.device("meta"):
        model = Tied()
    materialise_whole(model, torch.device("cpu"))
    assert model.last.weight is model.first.weight
    assert [name for name, _ in model.named_parameters()] == ["first.weight"]
    assert {tensor.device.type for tensor in (model.first.weight, model.table)} == {"cpu"}


def _parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def test_buckets_hold_each_parameter_once_from_last_to_first_and_large_ones_alone() -> None:
    parameters = _parameters(10, 2, 3, 9, 1, 1, 4)
    found = buckets_of(parameters, least_bytes=32)
    assert [[each.numel() for each in bucket] for bucket in found] == [[9], [4, 1, 1, 3], [10], [2]]
    assert [each for bucket in buckets_of(parameters) for each in bucket] == parameters[::-1]
    assert buckets_of([]) == []


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def _wide_layers() -> nn.Sequential:
    """Each weight is a bucket of its own."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))


def test_sums_begin_while_backward_goes_on_and_only_in_the_last_micro_batch(group: dist.ProcessGroup) -> None:
    model = _wide_layers()
    sums = ReplicaSums(model.parameters(), group)
    under_way: list[int] = []
    begun = dist.all_reduce
    inputs = torch.ones(1, 1024, requires_grad=True)

    def count(*args: Any, **kwargs: Any) -> Any:
        under_way[-1] += 1
        return begun(*args, **kwargs)

    seen_at_first_layer: list[int] = []
    model[0].register_full_backward_pre_hook(lambda *_: seen_at_first_layer.append(under_way[-1]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", count)
        for is_last in (False, True):
            under_way.append(0)
            sums.begin(is_last=is_last)
            model(inputs).sum().backward()
        sums.finish()
    assert under_way == [0, 3]
    assert seen_at_first_layer == [0, 2], "the sums of the layers behind it are on their way"


def test_gradients_of_a_lone_replica_are_what_autograd_gives_and_zeros_where_it_gives_none(
    group: dist.ProcessGroup,
) -> None:
    torch.manual_seed(1)
    model, unused = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)), nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    sums = ReplicaSums([*model.parameters(), unused, frozen], group)
    inputs = torch.randn(4, 5)
    for number, part in enumerate(inputs.split(2)):
        sums.begin(is_last=number == 1)
        model(part).square().sum().backward()
    sums.finish()
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert unused.grad is not None and not unused.grad.any()
    assert frozen.grad is None
