"""Five steps of training in a layout, each loss and gradient beside those of one plain fp32 process.

The reference is the plain decoder with torch's own cross-entropy and clipping in the test's process (and
`plain_optimizer`): no sharding, no slots.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layout_axes import tables_of
from parity import compare, dealt, gradients_of, names_of, relative, windows
from plain_optimizer import PlainOptimizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.core.box import whole
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.experts import stored_names
from phalanx.parallel import ParallelModel, build_mesh, multiple_of
from phalanx.parallel.initialise import fill
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import optimizer_of

STEPS = 5
LOSS_SCALE = 1024.0


def batch_of(job: Job, step: int) -> tuple[list[Tensor], int]:
    """Tokens, targets, positions and documents of a step, int64 [global_batch_size, seq_len]; and valid tokens."""
    drawn = windows(job.model.decoder.vocab_size, job.training.seed + step)
    tokens, targets, positions, documents = (field[: job.training.global_batch_size] for field in drawn)
    if not job.data.document_mask:
        positions, documents = torch.arange(tokens.shape[1]).expand_as(tokens).clone(), torch.zeros_like(documents)
    return [tokens, targets, positions, documents], int((targets != -100).sum())


def write_reference(choice: Mapping[str, Any], path: str) -> None:
    """What one process computes in fp32, as safetensors: the weights at first; by step the loss, the norm before
    clipping, every gradient before it, and how many tokens each expert had.
    """
    job = parse_job(tables_of(choice))
    decoder = Decoder(DecoderArgs.of(job.model.decoder))
    initial, names = decoder.initial_weights(), list(stored_names(decoder))
    weights = decoder.state_dict()
    with torch.no_grad():
        for name in names:
            shape = tuple(weights[name].shape)
            fill(weights[name], whole(shape), shape, initial[name], job.training.seed, name)
    optimizer = PlainOptimizer(decoder, job)
    decoder.load_state_dict(weights)
    tensors = {f"weight/{name}": weights[name].clone() for name in names}
    for step in range(STEPS):
        loss = _backward(decoder, job, step)
        tensors |= {f"{step}/gradient/{name}": g.clone() for name, g in gradients_of(decoder).items()}
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), job.training.max_norm, foreach=False)
        assert norm > job.training.max_norm, "every step is clipped"
        tensors |= {f"{step}/loss": loss, f"{step}/norm": norm}
        if decoder.routers:
            counts = [router.balance.take(torch.device("cpu"))[0] for router in decoder.routers.values()]
            tensors[f"{step}/expert_counts"] = torch.stack(counts)
            for router, count in zip(decoder.routers.values(), counts, strict=True):
                if router.selection_bias is not None:
                    rate = router.shape.bias_update_rate
                    router.selection_bias.data += rate * (count.double().mean() - count.double()).sign()
        optimizer.step()
    save_file(tensors, path)


def _backward(decoder: Decoder, job: Job, step: int) -> Tensor:
    """The loss of a step's batch; leaves the gradients of it, the z-loss and the loss of balance."""
    (tokens, targets, positions, documents), valid_tokens = batch_of(job, step)
    balance = (targets != -100).sum(1) / valid_tokens
    logits = decoder(tokens, positions, documents if job.data.document_mask else None, balance)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    log_z = logits[targets != -100].logsumexp(-1)
    decoder.zero_grad()
    (loss + job.loss.z_loss * log_z.square().mean()).backward()
    return loss.detach()


def run_choices(context: RankContext) -> None:
    """Entry of the ranks: `choices` by name, `references` by the same names; reports one row a choice."""
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    for name, choice in context.arguments["choices"].items():
        row = run_choice(choice, context.arguments["references"][name])
        context.report("result", **{name: row})
    dist.destroy_process_group()


def run_choice(choice: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Five steps as the loop of the trainer takes them. What differs from the reference: whether the weights at first
    are the same bits; by step the relative errors of loss, norm, all gradients as one vector, and the worst gradient
    with its name; and how many choices of an expert were others.
    """
    started_s, world_size = time.process_time(), dist.get_world_size()
    job = parse_job(tables_of(choice), world_size)
    layout, reference = job.layout(world_size), load_file(path)
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, "cpu")
    model.loss_scale = LOSS_SCALE if job.training.mixed_precision_param == "float16" else 1.0
    optimizer = optimizer_of(job, model.parameters(), ReplicaLink(None), mesh)
    row: dict[str, Any] = {"losses": [], "norms": [], "whole": [], "worst": [], "moved": []}
    for step in range(STEPS):
        whole_batch, valid_tokens = batch_of(job, step)
        divisor = multiple_of(job.parallel.schedule, layout.pp)
        batch = dealt(whole_batch, mesh.dp_rank, mesh.dp_size, job.parallel.local_batch_size, divisor)
        loss = model.forward_backward(batch, valid_tokens)
        model.finish_gradients()
        weights_equal, errors = compare(model, _at(reference, step))
        if not step:
            row["weights_equal"] = _on_all(weights_equal)
        summed = torch.stack([loss, model.gradient_square_sum(), *errors])
        dist.all_reduce(summed)
        norm = float(summed[1].sqrt())
        row["losses"].append(_off(float(summed[0]), reference[f"{step}/loss"]))
        row["norms"].append(_off(norm, reference[f"{step}/norm"]))
        row["whole"].append(float(summed[2:].sum().sqrt() / reference[f"{step}/norm"]))
        row["worst"].append(max(zip(relative(summed[2:], _at(reference, step)), names_of(reference), strict=True)))
        if (counts := model.take_expert_counts()) is not None:
            row["moved"].append(_moved(counts, reference[f"{step}/expert_counts"]))
            model.move_biases(counts)
        optimizer.update(model.gradients(), norm, 1.0)
        model.zero_gradients()
    return row | {"cpu_s": time.process_time() - started_s}


def _at(reference: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """The weights at first and the gradients of a step, by the names that `compare` looks for."""
    prefix = f"{step}/gradient/"
    gradients = {n.removeprefix(f"{step}/"): tensor for n, tensor in reference.items() if n.startswith(prefix)}
    return gradients | {name: tensor for name, tensor in reference.items() if name.startswith("weight/")}


def _moved(counts: Tensor, expected: Tensor) -> int:
    """How many choices of an expert were others. expected: of the layers with experts, which come last."""
    before, own = counts.split([len(counts) - len(expected), len(expected)])
    assert not before.any(), "dense layers choose none"
    return int((own - expected).abs().sum()) // 2


def _off(value: float, expected: Tensor) -> float:
    return abs(value - float(expected)) / float(expected)


def _on_all(flag: bool) -> bool:
    flags = torch.tensor([flag])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags)
