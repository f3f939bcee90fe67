"""Ranks that train a few steps with what replicas tell each other, and the same by torch's own parts in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import MODEL, NUM_WINDOWS, SEED, layout_of, make_job, slot_batch, windows
from safetensors.torch import save_file

from phalanx.core.box import HeldTensor, whole
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.parallel import ParallelModel, build_mesh, multiple_of
from phalanx.parallel.initialise import fill
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job
from phalanx.trainer.optimizer import optimizer_of
from phalanx.trainer.replicas import replicas_of

STEPS, MAX_NORM, LR = 4, 0.5, 3e-3
EPS = 1e-3  # large, as an update of a gradient near 0 has its sign from rounding otherwise


def replica_job(case: Mapping[str, Any]) -> Job:
    """The parity table's job with what a case changes, by section."""
    job = make_job(case)
    training = job.training.model_copy(update={"steps": STEPS, "max_norm": MAX_NORM})
    optimizer = job.optimizer.model_copy(update={"lr": LR, "eps": EPS, "implementation": "foreach"})
    changed = {name: getattr(job, name).model_copy(update=keys) for name, keys in case.get("sections", {}).items()}
    return job.model_copy(update={"training": training, "optimizer": optimizer, **changed})


def run_training(context: RankContext) -> None:
    """Entry of the ranks: `cases` by name, and `folder`, where rank 0 leaves what each came to."""
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    for name, case in context.arguments["cases"].items():
        row = run_case(case | {"world_size": context.world_size}, f"{context.arguments['folder']}/{name}.safetensors")
        context.report("result", **{name: row})
    dist.destroy_process_group()


def run_case(case: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`STEPS` steps as the loop takes them; rank 0 writes the weights and what the optimizer holds, whole."""
    job = replica_job(case)
    layout = layout_of(job, case["world_size"])
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, "cpu")
    link = ReplicaLink(mesh.replica_group)
    optimizer = optimizer_of(job, model.parameters(), link)
    replicas = replicas_of(job, link, torch.device("cpu"), optimizer, model.parameters())
    divisor = multiple_of(job.parallel.schedule, layout.pp)
    row: dict[str, Any] = {"bytes": [], "norms": [], "held_bytes": 0}
    for step in range(1, STEPS + 1):
        batch, valid_tokens = slot_batch(
            mesh.dp_rank, mesh.dp_size, job.parallel.local_batch_size, divisor, MODEL["vocab_size"], shift=step
        )
        model.forward_backward(batch, valid_tokens)
        model.finish_gradients()
        gradients = model.gradients()
        replicas.prepare(gradients)
        squares = replicas.squares_of(model.gradient_square_sum(gradients, by_replica=replicas.clips_apart))
        dist.all_reduce(squares)
        norms = squares.sqrt().tolist()
        optimizer.update(gradients, replicas.norm_of(norms), 1.0)
        model.zero_gradients()
        replicas.meet(step, STEPS, applied=True)
        row["bytes"].append(replicas.take_bytes(step, STEPS))
        row["norms"].append(math.sqrt(sum(norm**2 for norm in norms) / len(norms)))
    row["held_bytes"] = _all_ranks(sum(4 * each.local.numel() for each in model.parameters()))
    write_whole([*model.parameters(), *optimizer.state()], path)
    return row


def _all_ranks(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def write_whole(held: Sequence[HeldTensor], path: str) -> None:
    """Rank 0 writes all tensors whole; NaN where two holders of an element differ by a bit."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(list(held), gathered if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for each in (tensor for tensors_of_rank in gathered for tensor in tensors_of_rank):
        found = tensors.setdefault(each.name, torch.full(each.global_shape, math.nan))
        is_filled = filled.setdefault(each.name, torch.zeros(each.global_shape, dtype=torch.bool))
        place = whole(each.global_shape).slices_of(each.box)
        differs = is_filled[place] & (found[place] != each.local)
        found[place] = torch.where(differs, math.nan, each.local)
        is_filled[place] = True
    save_file(tensors, path)


class OneReplica:
    """One replica by torch's own parts: the plain decoder, AdamW, clipping. share: its windows of the batch."""

    def __init__(self, replica: int, num_replicas: int, dp_size: int, local: int) -> None:
        self.model, self.num_replicas = Decoder(DecoderArgs.of_plain(MODEL)), num_replicas
        initial = self.model.initial_weights()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                shape = tuple(parameter.shape)
                fill(parameter, whole(shape), shape, initial[name], SEED, name)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=LR,
            betas=(0.9, 0.95),
            eps=EPS,
        )
        per_replica = dp_size // num_replicas
        self.rows = [row for row in range(NUM_WINDOWS) if (row // local) % dp_size // per_replica == replica]

    def backward(self, step: int, scale: float) -> None:
        """Gradients of this replica's part of the batch's loss, times `scale`."""
        tokens, targets, positions, documents = (field.roll(step, 0) for field in windows(MODEL["vocab_size"]))
        num_valid = int((targets != -100).sum())
        logits = self.model(*(field[self.rows] for field in (tokens, positions, documents)))
        loss = F.cross_entropy(logits.flatten(0, 1), targets[self.rows].flatten(), ignore_index=-100, reduction="sum")
        self.optimizer.zero_grad()
        (loss * (scale / num_valid)).backward()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments, under the names of `run_case`."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().clone()
            state = self.optimizer.state[parameter]
            found |= {f"optim.{name}.{moment}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        return found


def gradients_of(replica: OneReplica, scale: float, step: int) -> dict[str, torch.Tensor]:
    """By name, of a replica's part of the batch's loss times `scale`."""
    replica.backward(step, scale)
    return {n: p.grad for n, p in replica.model.named_parameters() if p.grad is not None}


def clip(gradients: Mapping[str, torch.Tensor]) -> None:
    """In place, by the norm of all together."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for gradient in gradients.values():
        gradient.mul_(torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))


def trained_by_powersgd(num_replicas: int, rank: int, queries: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """PowerSGD by whole matrices, Gram-Schmidt by a QR of the sum of all replicas' products; then AdamW."""
    replicas = [OneReplica(i, num_replicas, num_replicas, 1) for i in range(num_replicas)]
    errors = [{name: torch.zeros(()) for name in queries} for _ in replicas]
    queries = dict(queries)
    for step in range(1, STEPS + 1):
        given = [gradients_of(each, 1.0, step) for each in replicas]
        summed = {name: torch.stack([each[name] for each in given]).sum(0) for name in given[0]}
        for name, query in queries.items():
            matrices = [each[name] + error[name] for each, error in zip(given, errors, strict=True)]
            basis = torch.linalg.qr(torch.stack([matrix @ query for matrix in matrices]).sum(0)).Q
            for matrix, error in zip(matrices, errors, strict=True):
                error[name] = matrix - basis @ basis.T @ matrix
            queries[name] = torch.stack([matrix.T @ basis for matrix in matrices]).sum(0)
            summed[name] = basis @ queries[name].T
        clip(summed)
        for each in replicas:
            for name, parameter in each.model.named_parameters():
                parameter.grad = summed[name].clone()
            each.optimizer.step()
    return replicas[0].tensors()


def signs_of(values: torch.Tensor, block: int) -> torch.Tensor:
    """Each block's mean magnitude, as bfloat16 has it, with each element's sign."""
    parts = values.flatten().split(block)
    signs = [part.abs().mean().bfloat16().float() * torch.where(part < 0, -1.0, 1.0) for part in parts]
    return torch.cat(signs).view_as(values)


def trained_by_signs(num_replicas: int, warmup: int, block: int) -> dict[str, Any]:
    """1-bit Adam tensor by tensor, without packing or parts: both compressions and errors, the second moment frozen."""
    replicas = [OneReplica(i, num_replicas, num_replicas, 1) for i in range(num_replicas)]
    names = [name for name, _ in replicas[0].model.named_parameters()]
    worker = [dict.fromkeys(names, torch.zeros(())) for _ in replicas]
    server = dict.fromkeys(names, torch.zeros(()))
    for step in range(1, STEPS + 1):
        frozen = step > warmup
        given = [gradients_of(each, num_replicas if frozen else 1.0, step) for each in replicas]
        if not frozen:
            summed = {name: torch.stack([each[name] for each in given]).sum(0) for name in names}
            clip(summed)
            for each in replicas:
                for name, parameter in each.model.named_parameters():
                    parameter.grad = summed[name].clone()
                each.optimizer.step()
            continue
        for each in given:
            clip(each)
        for name in names:
            states = [each.optimizer.state[each.model.get_parameter(name)] for each in replicas]
            sent = []
            for state, gradients, error in zip(states, given, worker, strict=True):
                value = 0.9 * state["exp_avg"] + 0.1 * gradients[name] + error[name]
                sent.append(signs_of(value, block))
                error[name] = value - sent[-1]
            mean = torch.stack(sent).mean(0) + server[name]
            momentum = signs_of(mean, block)
            server[name] = mean - momentum
            for each, state in zip(replicas, states, strict=True):
                _frozen_step(each.model.get_parameter(name), state, momentum, step, warmup)
    return replicas[0].tensors()


@torch.no_grad()
def _frozen_step(
    parameter: torch.Tensor, state: dict[str, torch.Tensor], momentum: torch.Tensor, step: int, warmup: int
) -> None:
    state["exp_avg"].copy_(torch.where(state["exp_avg_sq"] > 0, momentum, 0.0))
    parameter.mul_(1 - LR * (0.1 if parameter.dim() > 1 else 0.0))
    root = (state["exp_avg_sq"] / (1 - 0.95**warmup)).sqrt()
    parameter.sub_(LR * state["exp_avg"] / (1 - 0.9**step) / (root + EPS))


def locally_trained(num_replicas: int, dp_size: int, steps: int, outer_lr: float, momentum: float) -> dict[str, Any]:
    """Local updates by AdamW in each replica and torch's SGD outside; the moments averaged at the end of a round."""
    replicas = [OneReplica(i, num_replicas, dp_size, 1) for i in range(num_replicas)]
    shared = OneReplica(0, num_replicas, dp_size, 1).model
    outer = torch.optim.SGD(shared.parameters(), lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, STEPS + 1):
        for each in replicas:
            each.backward(step, num_replicas)
            torch.nn.utils.clip_grad_norm_(each.model.parameters(), MAX_NORM)
            each.optimizer.step()
        if step % steps and step != STEPS:
            continue
        for together in zip(shared.parameters(), *(each.model.parameters() for each in replicas), strict=True):
            common, *own = together
            common.grad = torch.stack([common.detach() - parameter.detach() for parameter in own]).mean(0)
        outer.step()
        with torch.no_grad():
            for together in zip(shared.parameters(), *(each.model.parameters() for each in replicas), strict=True):
                states = [each.optimizer.state[p] for each, p in zip(replicas, together[1:], strict=True)]
                for parameter in together[1:]:
                    parameter.copy_(together[0])
                for moment in ("exp_avg", "exp_avg_sq"):
                    mean = torch.stack([state[moment] for state in states]).mean(0)
                    for state in states:
                        state[moment].copy_(mean)
    momenta = {
        f"optim.{name}.outer_momentum": outer.state[parameter].get("momentum_buffer", parameter.grad)
        for name, parameter in shared.named_parameters()
    }
    return replicas[0].tensors() | {name: buffer.clone() for name, buffer in momenta.items()}
