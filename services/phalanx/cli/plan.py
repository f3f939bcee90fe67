"""`phalanx plan JOB`: parameters, operations and memory of a job, before anything is started."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.config import AsJson, JobFile, Overrides, World
from phalanx.cli.output import print_json
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.planner import ModelShape, ParameterCounts, RankMemory, RunShape, TokenFlops
    from phalanx.spec import Job, Layout

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a job on a layout. gpu_bytes: None where the kind of GPU is not given."""

    layout: Layout
    parameters: ParameterCounts
    causal: TokenFlops
    full: TokenFlops
    micro_batches: int
    tokens_per_step: int
    memory: tuple[RankMemory, ...]
    gpu_bytes: int | None

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits its GPU; None where the GPU is not known."""
        return None if self.gpu_bytes is None else all(rank.total_bytes <= self.gpu_bytes for rank in self.memory)


def register(app: typer.Typer) -> None:
    """Adds the `plan` command to the command line."""
    app.command("plan")(plan)


def plan(job_file: JobFile, overrides: Overrides = None, world: World = None, as_json: AsJson = False) -> None:
    """Count parameters, operations and memory of a job, and say whether it fits its GPUs."""
    from phalanx.spec import load_job

    job = load_job(job_file, overrides or (), world, check_world=True)
    found = make_plan(job, world or job.cluster.world_size)
    if as_json:
        print_json(as_dict(found))
    else:
        _show(found, job)


def make_plan(job: Job, world_size: int) -> Plan:
    """The plan of a job on `world_size` ranks. Raises PhalanxError for a model or a GPU that cannot be counted."""
    from phalanx import planner

    model, run, layout = model_shape(job), run_shape(job), job.layout(world_size)
    return Plan(
        layout=layout,
        parameters=planner.count_parameters(model),
        causal=planner.token_flops(model, run.seq_len, causal=True, recompute=run.recompute),
        full=planner.token_flops(model, run.seq_len, causal=False, recompute=run.recompute),
        micro_batches=planner.num_micro_batches(layout, run),
        tokens_per_step=run.global_batch_size * run.seq_len,
        memory=planner.rank_memory(model, layout, run, planner.RUNTIME_BYTES if job.cluster.device == "cuda" else 0),
        gpu_bytes=_gpu_bytes(job),
    )


def model_shape(job: Job) -> ModelShape:
    """The planner's view of the model. Raises PhalanxError for a class of the user's, whose shape nobody knows."""
    from phalanx.planner import ModelShape

    if job.model.class_ is not None:
        raise PhalanxError(
            "model.class",
            value=job.model.class_,
            expected="Phalanx's own decoder, whose shape is known without running it",
            remedy="plan with model.args of a decoder of about the same size",
        )
    args, moe = job.model.decoder, job.model.decoder.moe
    return ModelShape(
        dim=args.dim,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        ffn_dim=args.ffn_dim,
        vocab_size=args.vocab_size,
        tie_embeddings=args.tie_embeddings,
        **(moe.model_dump() if moe else {}),
    )


def run_shape(job: Job) -> RunShape:
    """The planner's view of how the job trains."""
    from phalanx.planner import RunShape

    width = {"bfloat16": 2, "float32": 4}
    return RunShape(
        seq_len=job.training.seq_len,
        global_batch_size=job.training.global_batch_size,
        local_batch_size=job.parallel.local_batch_size,
        zero=job.parallel.zero,
        schedule=job.parallel.schedule,
        stages_per_rank=job.parallel.stages_per_rank,
        recompute=job.activation_checkpoint.mode == "full",
        document_mask=job.data.document_mask,
        param_bytes=width[job.training.mixed_precision_param],
        reduce_bytes=width[job.training.mixed_precision_reduce],
    )


def _gpu_bytes(job: Job) -> int | None:
    from phalanx.planner import gpu_memory_bytes

    if job.cluster.gpu_memory_gib is not None:
        return int(job.cluster.gpu_memory_gib * GIB)
    return None if job.cluster.gpu is None else gpu_memory_bytes(job.cluster.gpu)


def as_dict(found: Plan) -> dict[str, Any]:
    """The plan as one JSON object; bytes and counts, never rounded."""
    flops = {
        name: {**asdict(each), "model": each.model, "hardware": each.hardware}
        for name, each in (("causal", found.causal), ("full", found.full))
    }
    counts = asdict(found.parameters)
    return {
        "world_size": found.layout.world_size,
        "layout": asdict(found.layout),
        "parameters": {**counts, "total": found.parameters.total, "active": found.parameters.active},
        "flops_per_token": flops,
        "tokens_per_step": found.tokens_per_step,
        "micro_batches": found.micro_batches,
        "memory": [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in found.memory],
        "gpu_bytes": found.gpu_bytes,
        "fits": found.fits,
    }


def _show(found: Plan, job: Job) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    counts = found.parameters
    console.print(f"{job.job.name} on {found.layout.world_size} ranks: {_axes(found.layout)}", highlight=False)
    console.print(_parameter_table(counts))
    for line in _operations(found):
        console.print(line, highlight=False)
    console.print(
        f"a step: {found.tokens_per_step:,} tokens, {found.micro_batches} micro-batches a rank, "
        f"{found.causal.model * found.tokens_per_step:.4g} operations",
        highlight=False,
    )
    console.print(_memory_table(found.memory))
    if found.gpu_bytes is not None:
        largest = max(rank.total_bytes for rank in found.memory)
        verdict = "fits" if found.fits else "does not fit"
        name = job.cluster.gpu or "the GPU"
        console.print(
            f"{verdict}: at most {largest / GIB:.1f} of {found.gpu_bytes / GIB:.1f} GiB on {name}", highlight=False
        )


def _operations(found: Plan) -> list[str]:
    causal, full = found.causal, found.full
    lines = [f"operations a token: {causal.model:.4g} with the causal mask counted, {full.model:.4g} without"]
    if causal.recompute:
        lines.append(f"with recompute: {causal.hardware:.4g} and {full.hardware:.4g}")
    return lines


def _axes(layout: Layout) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in asdict(layout).items() if axis != "ep" and size > 1) or "1"
    return axes + (f", ep {layout.ep}" if layout.ep > 1 else "")


def _parameter_table(counts: ParameterCounts) -> Any:
    from rich.table import Table

    table = Table(title="Parameters", title_justify="left")
    table.add_column("part")
    table.add_column("count", justify="right")
    for part in ("embedding", "attention", "ffn", "router", "experts", "norms", "head"):
        if getattr(counts, part):
            table.add_row(part, f"{getattr(counts, part):,}")
    table.add_row("total", f"{counts.total:,}", style="bold")
    if counts.active != counts.total:
        table.add_row("active for a token", f"{counts.active:,}", style="bold")
    return table


def _memory_table(memory: tuple[RankMemory, ...]) -> Any:
    from rich.table import Table

    unit, name = (GIB, "GiB") if max(rank.total_bytes for rank in memory) >= GIB else (MIB, "MiB")
    table = Table(title=f"Memory of one rank, {name} (activations are an estimate)", title_justify="left")
    for column in ("pp", "layers", "params", "master", "weight", "grad", "optim", "activ", "total"):
        table.add_column(column, justify="right")
    for rank in memory:
        amounts = (
            rank.masters_bytes,
            rank.weights_bytes,
            rank.gradients_bytes,
            rank.optimizer_bytes,
            rank.activations_bytes,
            rank.total_bytes,
        )
        place = (str(rank.position.pp_rank), str(rank.position.num_layers), f"{rank.parameters / 1e6:,.1f}M")
        table.add_row(*place, *(f"{each / unit:.2f}" for each in amounts))
    return table
        head_width=args.head_dim,
        qk_norm=args.qk_norm,
        qkv_bias=args.qkv_bias,
