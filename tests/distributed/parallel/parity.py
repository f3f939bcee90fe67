"""Ranks of the parity table: every layout of one world size in one gang, each compared box by box with one plain
process.

The reference is the plain decoder in the test's own process: no sharding, no slots, torch's own cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.core.box import whole
from phalanx.core.errors import PhalanxError
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.experts import stacked_names, stored_name, stored_names
from phalanx.models.protocol import Initial
from phalanx.parallel import ParallelModel, SlotBatch, build_mesh, multiple_of
from phalanx.parallel.initialise import fill
from phalanx.spec import Job, Layout, parse_job

SEQ_LEN, NUM_WINDOWS, SEED = 16, 8, 5
LOSS_SCALE = 1024.0
MODEL = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 96}


def make_job(case: Mapping[str, Any]) -> Job:
    """A job from a case of the table: `model`, `parallel` and other keys over the small defaults.

    unchecked: keys of [parallel] that the job file's own checks don't see.
    """
    job = parse_job(
        {
            "job": {"name": "parity", "storage": "memory://parity"},
            "model": {"args": MODEL | case.get("model", {}), "attn_backend": case.get("attn_backend", "sdpa")},
            "data": {"train": "memory://parity/train"},
            "training": {
                "seq_len": case.get("seq_len", SEQ_LEN),
                "steps": 1,
                "global_batch_size": NUM_WINDOWS,
                "seed": SEED,
            }
            | {"mixed_precision_param": case.get("dtype", "float32")}
            | {"mixed_precision_reduce": case.get("reduce", "float32"), "float8_recipe": case.get("float8", "none")},
            "optimizer": {"lr": 1e-3},
            "parallel": case.get("parallel", {}),
            "activation_checkpoint": {"mode": case.get("recompute", "none"), "every": case.get("every", 1)},
            "loss": {"chunk_tokens": case.get("chunk_tokens", 0), "z_loss": case.get("z_loss", 0.0)},
            "compile": {"enable": case.get("compile", False)},
            "cluster": {"nproc": case["world_size"]},
        }
    )
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=case.get("unchecked", {}))})


def layout_of(job: Job, world_size: int) -> Layout:
    """The job's axis sizes with dp_shard as the rest, without the job file's checks."""
    sizes = {axis: getattr(job.parallel, axis) for axis in ("pp", "dp_replicate", "cp", "tp")}
    return Layout(dp_shard=world_size // math.prod(sizes.values()), **sizes, ep=job.parallel.ep)


def windows(vocab_size: int, seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets, positions, documents, int64 [NUM_WINDOWS, SEQ_LEN]: two documents a window, some targets not
    counted.
    """
    drawn = torch.randint(0, vocab_size, (NUM_WINDOWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    tokens, targets = drawn[:, :-1].clone(), drawn[:, 1:].clone()
    boundary = torch.arange(NUM_WINDOWS)[:, None] + 3
    index = torch.arange(SEQ_LEN).expand(NUM_WINDOWS, -1)
    documents = (index >= boundary).long()
    positions = index - documents * boundary
    targets[index == boundary - 1] = -100
    targets[-1, 4:] = -100
    return tokens, targets, positions, documents


def write_reference(path: str, model: Mapping[str, Any], z_loss: float = 0.0) -> None:
    """Weights, loss, and gradients of it and the z-loss, of one fp32 process, as safetensors."""
    args = DecoderArgs.of_plain(MODEL | dict(model))
    decoder = Decoder(args)
    initial, names = decoder.initial_weights(), list(stored_names(decoder))
    tokens, targets, positions, documents = windows(args.vocab_size)
    with torch.no_grad():
        weights = decoder.state_dict()
        for name in names:
            shape = tuple(weights[name].shape)
            fill(weights[name], whole(shape), shape, initial[name], SEED, name)
    balance = (targets != -100).sum(1) / (targets != -100).sum()
    logits = decoder(tokens, positions, documents, balance)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    log_z = logits[targets != -100].logsumexp(-1)
    (loss + z_loss * log_z.square().mean()).backward()
    tensors = {"loss": loss.detach()}
    if decoder.routers:
        taken = [router.balance.take(torch.device("cpu")) for router in decoder.routers.values()]
        tensors["expert_counts"] = torch.stack([counts for counts, _ in taken])
        tensors["balance_loss"] = torch.stack([loss for _, loss in taken]).sum()
    gradients = gradients_of(decoder)
    for name in names:
        tensors |= {f"weight/{name}": weights[name].clone(), f"gradient/{name}": gradients[name].clone()}
    save_file(tensors, path)


def gradients_of(decoder: Decoder) -> dict[str, Tensor]:
    """By stored name; zeros of what does not train."""
    found = {}
    for name, parameter in decoder.named_parameters():
        gradient = parameter.grad if parameter.requires_grad else torch.zeros_like(parameter)
        assert gradient is not None
        found[name] = gradient
    return by_stored_name(decoder, found)


def by_stored_name(decoder: Decoder, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the decoder's own names, those of experts apart."""
    by_expert, apart = stacked_names(decoder), {}
    for name, tensor in found.items():
        rows = range(by_expert.get(name, 0))
        apart |= {stored_name(name, row): tensor[row] for row in rows} if rows else {name: tensor}
    return apart


def slot_batch(
    dp_rank: int, dp_size: int, local: int, divisor: int, vocab_size: int, shift: int = 0
) -> tuple[SlotBatch, int]:
    """A dp rank's slots by the batch rule, surplus ones with token 0 and no target; and the global count of valid
    tokens. shift: by how many the windows of the batch are rolled.
    """
    whole_batch = tuple(field.roll(shift, 0) for field in windows(vocab_size))
    return dealt(whole_batch, dp_rank, dp_size, local, divisor), int((whole_batch[1] != -100).sum())


def dealt(whole_batch: Sequence[Tensor], dp_rank: int, dp_size: int, local: int, divisor: int) -> SlotBatch:
    """A dp rank's slots of the fields of `windows`, of any number of windows."""
    num_windows = len(whole_batch[0])
    num_slots = -(-num_windows // (dp_size * local))
    num_slots = -(-num_slots // divisor) * divisor
    rows = [(slot * dp_size + dp_rank) * local + i for slot in range(num_slots) for i in range(local)]
    surplus = torch.tensor([row >= num_windows for row in rows])
    fields = [tensor[[row % num_windows for row in rows]] for tensor in whole_batch]
    for tensor, value in zip(fields, (0, -100, 0, 0), strict=True):
        tensor[surplus] = value
    return SlotBatch(*fields, num_slots=num_slots)


def run_table(context: RankContext) -> None:
    """Entry of the ranks: `cases` by name, `references` by the name that a case gives; reports one row a case."""
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    for name, case in context.arguments["cases"].items():
        row = run_case(case | {"world_size": context.world_size}, context.arguments["references"][case["reference"]])
        context.report("result", **{name: row})
    dist.destroy_process_group()


def run_unchecked(context: RankContext) -> None:
    """As `run_table`, with what a pipeline refuses let through to torch, and blocks freed as if it could."""
    freed = mock.patch("phalanx.parallel.model.frees_weights", return_value=True)
    with mock.patch("phalanx.parallel.model.check_pipeline"), freed:
        run_table(context)


def run_case(case: Mapping[str, Any], reference_path: str) -> dict[str, Any]:
    """One layout of the decoder; see `run_job`."""
    job = make_job(case)
    return run_job(job, case["world_size"], job.model.decoder.vocab_size, reference_path)


def run_job(job: Job, world_size: int, vocab_size: int, reference_path: str) -> dict[str, Any]:
    """One layout: two steps (the second from dropped gradients), one evaluation, compared with the reference."""
    reference, layout = load_file(reference_path), layout_of(job, world_size)
    mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, "cpu")
    model.loss_scale = LOSS_SCALE if job.training.mixed_precision_param == "float16" else 1.0
    divisor = multiple_of(job.parallel.schedule, layout.pp)
    batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, job.parallel.local_batch_size, divisor, vocab_size)
    losses = []
    for _ in range(2):
        losses.append(model.evaluate(batch, valid_tokens))
        model.zero_gradients()
        losses.append(model.forward_backward(batch, valid_tokens))
        model.finish_gradients()
    norm = gradient_norm(model)
    counts = model.take_expert_counts()
    weights_equal, squares = compare(model, reference)
    measured = model.measure(batch, valid_tokens)[1:] if model.metrics else ()
    summed = torch.stack([*losses, *squares, *measured, model.balance_loss])
    dist.all_reduce(summed)
    errors, metrics = summed[len(losses) : -1].tensor_split([len(names_of(reference))])
    flags = torch.tensor([weights_equal])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return {
        "weights_equal": bool(flags),
        "losses": summed[: len(losses)].tolist(),
        "gradient_errors": dict(zip(names_of(reference), relative(errors, reference), strict=True)),
        "metrics": dict(zip(model.metrics, metrics.tolist(), strict=True)),
        "norm": norm,
        "counts_equal": counts is None or equal_counts(counts, 2 * reference["expert_counts"]),
        "balance_loss": summed[-1].item(),
        "expected_balance_loss": 0.0 if counts is None else 2 * reference["balance_loss"].item(),
    }


def equal_counts(found: Tensor, expected: Tensor) -> bool:
    """Of the layers with experts, which come last; those before have no tokens."""
    before, rest = found.split([len(found) - len(expected), len(expected)])
    return not before.any() and torch.equal(rest, expected)


def run_refused(context: RankContext) -> None:
    """Entry of the ranks: jobs that can't be laid out so; reports what each is told."""
    init_process_group(context, 60.0)
    for name, case in context.arguments["cases"].items():
        job = (make_user_job if "class" in case else make_job)(case | {"world_size": context.world_size})
        layout = layout_of(job, context.world_size)
        mesh = build_mesh(layout, "cpu", schedule=job.parallel.schedule)
        try:
            ParallelModel(job, layout, mesh, "cpu")
        except PhalanxError as error:
            context.report("result", **{name: str(error)})
    dist.destroy_process_group()


def make_user_job(case: Mapping[str, Any]) -> Job:
    """A job whose model is a class of its own."""
    job = make_job(case)
    model = job.model.model_copy(update={"class_": case["class"], "args": {"vocab_size": 24, "dim": 8}})
    return job.model_copy(update={"model": model})


class Bigrams(nn.Module):
    """A user's model with nothing but forward, weights of its own, a buffer, and a block list."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, vocab_size)
        self.register_buffer("scale", torch.full((dim,), 0.5), persistent=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


class ByCounter(Bigrams):
    """Gives its initial weights, so that nothing but its buffer comes from `__init__`."""

    def initial_weights(self) -> Mapping[str, Initial]:
        return {name: Initial(std=0.1) for name, _ in self.named_parameters()}


class HalfPrecision(ByCounter):
    """Has bfloat16 parameters."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.to(torch.bfloat16)
        self.scale = self.scale.float()


class OneRow(ByCounter):
    """Has a parameter of a single row, of which all ranks but one hold nothing, and one that no loss depends on."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.gain = nn.Parameter(torch.ones(1, dim))
        self.idle = nn.Parameter(torch.ones(dim))

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        return super().forward(tokens, position_ids, document_ids) * (1 + self.gain.sum())


class Dropping(Bigrams):
    """Drops half of each block's inside."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.5)) for _ in range(2)])


def run_user_models(context: RankContext) -> None:
    """Entry of the ranks: loss, gradient norm and held elements of each case's class on this world size.

    Memory that nothing has filled is made NaN, so that it shows.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    init_process_group(context, 60.0)
    for name, case in context.arguments["cases"].items():
        job = make_user_job(case | {"world_size": context.world_size})
        layout = layout_of(job, context.world_size)
        mesh = build_mesh(layout, "cpu")
        model = ParallelModel(job, layout, mesh, "cpu")
        batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, 1, 1, 24)
        model.seed_step(1)
        loss = model.forward_backward(batch, valid_tokens)
        dist.all_reduce(loss)
        num_held = torch.tensor(sum(held.local.numel() for held in model.parameters()))
        dist.all_reduce(num_held)
        row = {"loss": float(loss), "norm": gradient_norm(model), "num_held": int(num_held)}
        row["has_empty"] = any(held.local.numel() == 0 for held in model.parameters())
        row["are_fp32"] = all(held.local.dtype == torch.float32 for held in model.parameters())
        context.report("result", **{name: row})
    dist.destroy_process_group()


def gradient_norm(model: ParallelModel) -> float:
    """L2 norm over the whole model, each global element once."""
    square_sum = model.gradient_square_sum()
    dist.all_reduce(square_sum)
    return float(square_sum.sqrt())


def names_of(reference: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted(name.removeprefix("weight/") for name in reference if name.startswith("weight/"))


def compare(model: ParallelModel, reference: Mapping[str, torch.Tensor]) -> tuple[bool, Iterator[torch.Tensor]]:
    """Whether the held weights are the reference's, bit for bit; and by name (sorted) this rank's part of the squared
    error.
    """
    errors = {name: torch.zeros(()) for name in names_of(reference)}
    are_equal = True
    for held, gradient in zip(model.parameters(), model.gradients(), strict=True):
        box = whole(held.global_shape).slices_of(held.box)
        are_equal &= torch.equal(held.local, reference[f"weight/{held.name}"][box])
        held_gradient = torch.zeros(held.box.shape) if gradient is None else gradient.view(held.box.shape)
        error = held_gradient - reference[f"gradient/{held.name}"][box]
        errors[held.name] += error.square().sum() / held.num_replicas
    return are_equal, iter(errors.values())


def relative(squares: torch.Tensor, reference: Mapping[str, torch.Tensor]) -> list[float]:
    norms = torch.stack([reference[f"gradient/{name}"].norm() for name in names_of(reference)])
    return (squares.sqrt() / norms.clamp(min=1e-12)).tolist()
