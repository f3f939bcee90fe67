"""What `phalanx plan` prints for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.cli.output import print_table
from phalanx.cli.plan_search import Judged, lines, rival_rows

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.cli.plan import Plan, Report
    from phalanx.planner import ParameterCounts, RankMemory
    from phalanx.spec import Job, Layout

MIB, GIB = 2**20, 2**30


def show(report: Report, *, timeline: bool) -> None:
    """Prints a report: the job's own layout, then what was asked for."""
    from rich.console import Console

    console = Console(soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if report.said:
        say(report.said)
    if report.refused is not None:
        say(f"the job's own layout is none for these GPUs: {report.refused}")
        console.print(_parameter_table(report.found.parameters))
    else:
        _show_own(report, console)
    if report.best is not None and report.found.fits is False:
        say("no time or cost of a layout that does not fit; the best one is below")
    elif report.own is not None:
        for line in lines(report.own, report.job):
            say(line)
    for name, judged in (("asked", report.compared), ("best", report.best)):
        if judged is not None:
            _show_judged(name, judged, report.job, say)
    if report.best is not None:
        _show_rivals(report.best, say)
    if timeline:
        from phalanx.planner.search import pipeline_run
        from phalanx.planner.timeline import terminal

        say("")
        say(terminal(pipeline_run(report.shown.estimate), width=console.width).rstrip())


def _show_judged(name: str, judged: Judged, job: Job, say: Callable[[str], None]) -> None:
    from phalanx.planner.rivals import layout_line, why_not
    from phalanx.planner.timeline import seconds

    say("")
    say(f"{name}: {layout_line(judged.estimate.candidate)}")
    if name == "asked":
        best = judged.search.best
        say(f"beside the best: {why_not(judged.search, judged.estimate)}")
        say(f"the best is {layout_line(best.candidate)}: {seconds(best.step.total_s)} a step")
    for line in lines(judged, job):
        say(line)


def _show_rivals(best: Judged, say: Callable[[str], None]) -> None:
    from phalanx.planner.rivals import parallel_section

    say("")
    title = f"The best with one thing different, of {len(best.search.estimates):,} layouts"
    print_table(("different", "layout", "why it loses"), rival_rows(best.search), title)
    say("")
    say(parallel_section(best.estimate.candidate).rstrip())


def _show_own(report: Report, console: Console) -> None:
    from phalanx.planner.job_search import FILLED
    from phalanx.planner.paging import paging_of

    found, job, counts = report.found, report.job, report.found.parameters
    console.print(f"{job.job.name} on {found.layout.world_size} ranks: {_axes(found.layout)}", highlight=False)
    console.print(_parameter_table(counts))
    for line in _operations(found):
        console.print(line, highlight=False)
    console.print(
        f"a step: {found.tokens_per_step:,} tokens, {found.micro_batches} micro-batches a rank, "
        f"{found.causal.model * found.tokens_per_step:.4g} operations",
        highlight=False,
    )
    for line in too_few_windows(job, found.layout):
        console.print(line, highlight=False)
    if found.layout.pp > 1:
        console.print(stages_line(job, found.layout), highlight=False)
    console.print(_memory_table(found.memory))
    if (paging := paging_of(job, found.layout)) is not None:
        console.print(paging.said, highlight=False, soft_wrap=True)
    if found.gpu_bytes is not None:
        largest = max(rank.total_bytes for rank in found.memory)
        verdict = "fits" if found.fits else "does not fit"
        name = job.cluster.gpu or "the GPU"
        console.print(
            f"{verdict}: at most {largest / GIB:.1f} of {found.gpu_bytes / GIB:.1f} GiB on {name}, of which a layout "
            f"may fill {FILLED:.0%}",
            highlight=False,
        )


def too_few_windows(job: Job, layout: Layout) -> list[str]:
    """A line for each way in which a step has fewer windows than the layout has places for."""
    batch, size = job.training.global_batch_size, job.parallel.local_batch_size
    lines = []
    if batch < layout.dp:
        idle = f"{layout.dp - batch:,} of {layout.dp:,} data-parallel replicas have no window"
        lines.append(f"idle: {idle} of a step's {batch:,}; raise training.global_batch_size")
    most = -(-batch // layout.dp)
    if size > most:
        lines.append(
            f"parallel.local_batch_size is {size:,}: a replica has at most {most:,} of the step's {batch:,} windows"
        )
    return lines


def stages_line(job: Job, layout: Layout) -> str:
    """Layers of each stage of the job's decoder, and by which rule: `stages of 8, 9, 9, 6 layers (cost)`."""
    from phalanx.planner.job_search import model_shape, run_shape
    from phalanx.planner.stage_split import stage_layers

    lengths = stage_layers(model_shape(job), layout.pp, run_shape(job))
    rule = "stated" if job.parallel.stage_lengths else job.parallel.stage_split
    return f"stages of {', '.join(map(str, lengths))} layers ({rule})"


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
    offloads = any(rank.host_bytes for rank in memory)
    on_device = {"weight": "weights", "grad": "gradients", "activ": "activations", "total": "total"}
    states = {"host": "host"} if offloads else {"master": "masters", "optim": "optimizer"}
    columns = {**states, **on_device}
    for column in ("pp", "layers", "params", *columns):
        table.add_column(column, justify="right")
    for rank in memory:
        amounts = (getattr(rank, f"{each}_bytes") for each in columns.values())
        place = (str(rank.position.pp_rank), str(rank.position.num_layers), f"{rank.parameters / 1e6:,.1f}M")
        table.add_row(*place, *(f"{each / unit:.2f}" for each in amounts))
    return table
