"""The outer optimizer of local updates, and what a replica of them tells, in one process."""

from __future__ import annotations

import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.parallel.replicas import ReplicaLink, buckets
from phalanx.spec import Job, parse_job
from phalanx.trainer.local_updates import LocalUpdates, nesterov_step
from phalanx.trainer.optimizer import optimizer_of
from phalanx.trainer.replicas import LocalReplicas, Replicas, replicas_of

CPU = torch.device("cpu")


def local_job(steps: int = 3, **keys: float) -> Job:
    return parse_job(
        {
            "job": {"name": "x", "storage": "memory://x"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://x/train"},
            "training": {"seq_len": 8, "steps": 6, "global_batch_size": 1, "max_norm": 0.0},
            "optimizer": {"lr": 1e-2, "implementation": "foreach"},
            "checkpoint": {"interval": 6},
            "local_updates": {"steps": steps, **keys},
        }
    )


def held(*shapes: tuple[int, ...]) -> list[HeldTensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        HeldTensor(f"p{i}", shape, whole(shape), torch.randn(shape, generator=generator))
        for i, shape in enumerate(shapes)
    ]


def gradients(tensors: list[HeldTensor], step: int) -> list[torch.Tensor | None]:
    return [torch.sin(3 * each.local + step) for each in tensors]


def test_outer_step_is_torchs_nesterov_sgd() -> None:
    ours, theirs = [each.local for each in held((4, 3), (5,))], [each.local for each in held((4, 3), (5,))]
    parameters = [torch.nn.Parameter(each) for each in theirs]
    sgd = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    momenta = [torch.zeros_like(each) for each in ours]
    for step in range(4):
        drawn = [torch.randn(each.shape, generator=torch.Generator().manual_seed(step)) for each in ours]
        for parameter, gradient in zip(parameters, drawn, strict=True):
            parameter.grad = gradient.clone()
        sgd.step()
        nesterov_step(ours, drawn, momenta, lr=0.7, momentum=0.9)
    for mine, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(mine, parameter.detach())


def test_one_replica_that_averages_is_the_plain_optimizer() -> None:
    job, tensors, plain = local_job(outer_lr=1.0, outer_momentum=0.0), held((4, 3), (5,)), held((4, 3), (5,))
    link = ReplicaLink(None)
    local = optimizer_of(job, tensors, link)
    other = optimizer_of(job.model_copy(update={"local_updates": local_job(0).local_updates}), plain, link)
    replicas = replicas_of(job, link, CPU, local, tensors)
    assert isinstance(local, LocalUpdates) and isinstance(replicas, LocalReplicas)
    for step in range(1, 7):
        local.update(gradients(tensors, step), 0.0, 1.0)
        other.update(gradients(plain, step), 0.0, 1.0)
        replicas.meet(step, 6, applied=True)
        for mine, its in zip(tensors, plain, strict=True):
            torch.testing.assert_close(mine.local, its.local, rtol=1e-6, atol=1e-7)
    assert local.counters() == {"num_updates": 6, "num_rounds": 2}
    assert replicas.take_bytes(6, 6) == 0, "one replica tells nobody anything"


def test_state_holds_the_outer_momentum_and_goes_on_bit_for_bit_from_the_end_of_a_round() -> None:
    job, tensors, link = local_job(), held((4, 3), ()), ReplicaLink(None)
    optimizer = LocalUpdates(job, tensors, link)
    replicas = LocalReplicas(link, CPU, optimizer, 3)

    def steps(trained: LocalUpdates, its: list[HeldTensor], first: int, last: int) -> None:
        for step in range(first, last + 1):
            trained.update(gradients(its, step), 0.0, 1.0)
            if replicas.is_one(step, 6):
                trained.end_round()

    steps(optimizer, tensors, 1, 3)
    copies = [HeldTensor(each.name, each.global_shape, each.box, each.local.clone()) for each in tensors]
    other = LocalUpdates(job, copies, link)
    stored = {each.name: each.local.clone() for each in optimizer.state()}
    assert {name.rpartition(".")[2] for name in stored} == {"exp_avg", "exp_avg_sq", "outer_momentum"}
    for each in other.state():
        each.local.copy_(stored[each.name])
    other.resume(optimizer.counters())
    steps(optimizer, tensors, 4, 6)
    steps(other, copies, 4, 6)
    for mine, its in zip([*tensors, *optimizer.state()], [*copies, *other.state()], strict=True):
        assert torch.equal(mine.local, its.local), mine.name
    assert other.num_rounds == optimizer.num_rounds == 2


def test_round_ends_every_few_steps_and_at_the_last() -> None:
    link = ReplicaLink(None)
    replicas = LocalReplicas(link, CPU, LocalUpdates(local_job(), held((2,)), link), 3)
    assert [step for step in range(1, 9) if replicas.is_one(step, 8)] == [3, 6, 8]
    assert [replicas.exchange_of(step, 8) for step in (2, 3)] == ["", "round"]
    plain = Replicas(link, CPU)
    assert all(plain.is_one(step, 8) for step in range(1, 9)) and plain.take_bytes(3, 8) == 0


def test_buckets_keep_the_order_and_leave_out_what_is_empty() -> None:
    tensors = [torch.zeros(size) for size in (3, 0, 20 << 20, 5, 1)]
    found = [[each.numel() for each in bucket] for bucket in buckets(tensors)]
    assert found == [[3], [20 << 20], [5, 1]]
    assert list(buckets([])) == []
