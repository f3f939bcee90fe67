"""Ranks of a foreign program: FSDP2, its own loop, its own state dict."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.core.errors import PhalanxError
from phalanx.gang import RankContext, init_process_group
from phalanx.lineage import CheckpointRef
from phalanx.snapshot import DamagedCheckpoint
from phalanx.snapshot.dcp import PhalanxReader, PhalanxWriter, async_save, load, save

WIDTH, DEADLINE_S = 37, 60  # an odd width: shards of different sizes


def make_program(world_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer, sharded where there are several ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, 1))
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randint(0, 10, (4,), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def whole_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor by its flat name, gathered; a collective."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= whole_tensors(value, f"{name}.")
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = full.detach().clone().contiguous()
    return found


def replicated_and_two_dimensional(world_size: int) -> dict[str, torch.Tensor]:
    """DTensors in other layouts than FSDP2's: replicated, cut in two dimensions, partly both."""
    torch.manual_seed(3)
    full = torch.randn(12, 10)
    if world_size == 1:
        return {"replicated": full.clone(), "grid": full.clone(), "hybrid": full.clone(), "plain": full.clone()}
    line = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2))
    return {
        "replicated": distribute_tensor(full, line, [Replicate()]),
        "grid": distribute_tensor(full, grid, [Shard(0), Shard(1)]),
        "hybrid": distribute_tensor(full, grid, [Replicate(), Shard(1)]),
        "plain": full.clone(),
    }


def saved(context: RankContext) -> None:
    """Trains, saves step 1 in the background while it goes on, saves step 2; rank 0 keeps what they held beside."""
    init_process_group(context, DEADLINE_S)
    url, folder = context.arguments["url"], Path(context.arguments["folder"])
    model, optimizer = make_program(context.world_size, 0)
    train(model, optimizer, 2, 1)
    refs = []
    for step in (1, 2):
        state = state_of(model, optimizer) | {"more": replicated_and_two_dimensional(context.world_size), "step": step}
        expected = whole_tensors(state)
        if step == 1:
            saving = async_save(state, url, step=step, deadline_s=DEADLINE_S)
            train(model, optimizer, 1, 2)  # its collectives run beside those of the save
            refs.append(saving.result(DEADLINE_S))
        else:
            refs.append(save(state, url, step=step, deadline_s=DEADLINE_S))
        if context.rank == 0:
            save_file(expected, folder / f"{step}.safetensors")
    context.report("result", refs=[[ref.attempt, ref.step] for ref in refs])
    dist.destroy_process_group()


def loaded(context: RankContext) -> None:
    """Loads step 1 in another number of ranks, then trains on and saves step 2 again: a new attempt."""
    init_process_group(context, DEADLINE_S)
    url, folder = context.arguments["url"], Path(context.arguments["folder"])
    model, optimizer = make_program(context.world_size, 9)
    state = state_of(model, optimizer) | {"more": replicated_and_two_dimensional(context.world_size), "step": 0}
    for tensor in state["more"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    ref = load(state, url, 1, deadline_s=DEADLINE_S)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    found = whole_tensors(state_of(model, optimizer) | {"more": state["more"]})
    if context.rank == 0:
        save_file(found, folder / "found.safetensors")
    train(model, optimizer, 1, 2)
    with warnings.catch_warnings():
        dcp.save(state, storage_writer=PhalanxWriter(url, 2))
    context.report("result", ref=[ref.attempt, ref.step], step=state["step"])
    dist.destroy_process_group()


def refused(context: RankContext) -> None:
    """Every rank hears what one of them failed with, as an ordinary error, and goes on."""
    init_process_group(context, DEADLINE_S)
    url, told = context.arguments["url"], {}
    ones = torch.ones(3)
    calls = {
        "value": lambda: save({"x": ones, "bad" if context.rank else "good": object()}, url, step=5),
        "missing": lambda: load({"x": ones} if context.rank == 0 else {"y": ones}, url),
        "damage": lambda: load({"model": {"w": torch.zeros(3)}}, context.arguments["damaged"]),
        "nothing": lambda: load({"x": ones}, f"{url}/nothing"),
    }
    save({"x": ones}, url, step=1)
    for name, call in calls.items():
        try:
            call()
        except (PhalanxError, DamagedCheckpoint) as error:
            told[name] = f"{type(error).__name__}: {error}"
    heard = {}
    for name, call in {
        "kind": lambda: save([ones] if context.rank else {"x": ones}, url, step=6),
        "step": lambda: async_save({"x": ones}, url, step="6" if context.rank else 6),
        "url": lambda: load({"x": ones}, 7 if context.rank else url),
    }.items():
        try:
            call()
        except PhalanxError as error:
            heard[name] = str(error)
    ref = save({"x": ones}, url, step=5)
    assert ref == CheckpointRef(1, 5), ref  # the save of step 5 before it was refused before anything was written
    try:
        dcp.load({"y": ones}, storage_reader=PhalanxReader(url))
    except dcp.CheckpointException as error:
        told["torch"] = str(error)
    context.report("result", told=told, heard=heard)
    dist.destroy_process_group()


def unheard(context: RankContext) -> None:
    """A background save fails, and rank 0 alone asks: the next save raises on all ranks, the one after it works."""
    init_process_group(context, DEADLINE_S)
    url, heard = context.arguments["url"], 0
    saving = async_save({"x": torch.ones(3), "bad": object()}, url, step=1)
    calls = [lambda: saving.result(DEADLINE_S)] if context.rank == 0 else []
    for call in [*calls, lambda: save({"x": torch.ones(3)}, url, step=2)]:
        try:
            call()
        except PhalanxError:
            heard += 1
    ref = save({"x": torch.ones(3)}, url, step=2)
    context.report("result", heard=heard, ref=[ref.attempt, ref.step])
    dist.destroy_process_group()


def in_line(context: RankContext) -> None:
    """Four saves of torch's on one process group, none waited for: their messages must not be mixed up."""
    init_process_group(context, DEADLINE_S)
    url = context.arguments["url"]
    futures = [
        dcp.async_save({f"rank{context.rank}": torch.full((3,), step)}, storage_writer=PhalanxWriter(url, step))
        for step in range(1, 5)
    ]
    for future in futures:
        future.result(DEADLINE_S)
    context.report("result")
    dist.destroy_process_group()
