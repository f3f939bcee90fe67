"""Muon as the planner counts it: memory as the optimizer itself has it, operations as torch counts them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phalanx.core.box import HeldTensor, whole
from phalanx.parallel import parameter_shapes
from phalanx.parallel.replicas import ReplicaLink
from phalanx.planner import ModelShape, RunShape, rank_memory
from phalanx.planner.compute import PRECISIONS, Chip
from phalanx.planner.job_search import model_shape, run_shape
from phalanx.planner.muon import hidden_matrices, iteration_flops, update_s
from phalanx.planner.network import cluster
from phalanx.planner.parameters import layer_counts
from phalanx.planner.software import software
from phalanx.planner.time import Configuration, step_time
from phalanx.spec import Job, Layout, parse_job
from phalanx.trainer.muon import orthogonal
from phalanx.trainer.optimizer import optimizer_of

LLAMA_8B = ModelShape(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=128_256)
RUN = RunShape(seq_len=8192, global_batch_size=128, zero=1)


def job_of(param: str = "bfloat16", **optimizer: object) -> Job:
    return parse_job(
        {
            "job": {"name": "muon", "storage": "memory://muon"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://muon/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 8, "mixed_precision_param": param},
            "optimizer": {"lr": 0.01, **optimizer},
        }
    )


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_bytes_are_those_of_the_optimizers_state(name: str) -> None:
    job = job_of(name=name)
    held = [HeldTensor(name, shape, whole(shape), torch.zeros(shape)) for name, shape in parameter_shapes(job).items()]
    state = optimizer_of(job, held, ReplicaLink(None)).state()
    expected = sum(each.local.numel() * each.local.element_size() for each in state)
    norms = sum(shape[0] for shape in parameter_shapes(job).values() if len(shape) == 1)
    (rank,) = rank_memory(model_shape(job), Layout(), run_shape(job), runtime_bytes=0)
    assert expected - 4 * norms * (name == "muon") <= rank.optimizer_bytes <= expected


def test_matrices_of_a_layer_are_all_but_its_norms() -> None:
    counts = layer_counts(LLAMA_8B)
    assert sum(rows * columns for rows, columns in hidden_matrices(LLAMA_8B)) == counts.attention + counts.ffn


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (6, 20), (20, 6)])
def test_operations_are_those_that_torch_counts(rows: int, columns: int) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.randn(rows, columns), 3, torch.float32)
    assert counter.get_total_flops() == 3 * iteration_flops(rows, columns)


def test_each_rank_computes_its_share_and_all_wait_for_whole_matrices() -> None:
    where = cluster("H100")
    chip = Chip(where.gpu, software(), PRECISIONS["bf16"])
    muon = dataclasses.replace(RUN, optimizer="muon")
    one, two = (update_s(LLAMA_8B, muon, 32, chip, where.group(ranks, 1)) for ranks in (1, 2))
    total = sum(5 * 32 * iteration_flops(*each) for each in hidden_matrices(LLAMA_8B))
    assert one == pytest.approx(total / chip.product_rate(PRECISIONS["bf16"]))
    sent = 4 * 32 * sum(rows * columns for rows, columns in hidden_matrices(LLAMA_8B))
    assert two == pytest.approx(one / 2 + sent / where.gpu.nvlink_gbps / 1e9, rel=1e-3)
    assert update_s(LLAMA_8B, RUN, 32, chip, where.group(2, 1)) == 0


@pytest.mark.parametrize(("param", "precision"), [("bfloat16", "bf16"), ("float16", "fp32"), ("float32", "fp32")])
def test_operations_run_in_bfloat16_beside_such_weights_alone(param: str, precision: str) -> None:
    job, where = job_of(param, name="muon"), cluster("H100")
    chip = Chip(where.gpu, software(), PRECISIONS["bf16"])
    model = model_shape(job)
    total = sum(5 * model.n_layers * iteration_flops(*each) for each in hidden_matrices(model))
    found = update_s(model, run_shape(job), model.n_layers, chip, where.group(1, 1))
    assert found == pytest.approx(total / chip.product_rate(PRECISIONS[precision]))


def test_step_with_muon_is_longer_by_its_optimizer_alone() -> None:
    configs = [
        Configuration(
            LLAMA_8B, Layout(dp_shard=64), dataclasses.replace(RUN, optimizer=name), cluster("H100"), software()
        )
        for name in ("adamw", "muon")
    ]
    adamw, muon = map(step_time, configs)
    assert muon.optimizer_s > adamw.optimizer_s
    assert dataclasses.replace(muon, optimizer_s=0.0, other_s=0.0) == dataclasses.replace(
        adamw, optimizer_s=0.0, other_s=0.0
    )
