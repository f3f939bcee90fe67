"""`phalanx plan JOB`: parameters, operations, memory, time, failures and cost of a job before anything is started; the
best layout, and why others lose to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson, JobFile, Overrides, World
from phalanx.cli.output import print_json
from phalanx.cli.places import given_path
from phalanx.cli.plan_search import (
    FREE_LAYOUT,
    Judged,
    candidate_of,
    check_number,
    cluster_settings,
    judge,
    layout_settings,
    rival_dicts,
    write_svg,
)
from phalanx.cli.plan_show import show
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.planner import ParameterCounts, RankMemory, TokenFlops
    from phalanx.planner.automatic import Chosen
    from phalanx.planner.prices import Prices
    from phalanx.planner.search import Estimate, Search
    from phalanx.spec import Job, Layout

GIB = 2**30


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
        """Whether every rank fits the part of its GPU that a layout may fill; None where the GPU is not known."""
        usable = self.usable_bytes
        return None if usable is None else all(rank.total_bytes <= usable for rank in self.memory)

    @property
    def usable_bytes(self) -> int | None:
        """What a layout may fill of a GPU, as in the search."""
        from phalanx.planner.job_search import FILLED

        return None if self.gpu_bytes is None else int(FILLED * self.gpu_bytes)


def register(app: typer.Typer) -> None:
    """Adds the `plan` command to the command line."""
    app.command("plan")(plan)


Gpus = Annotated[str | None, typer.Option("--gpus", metavar="KIND:NUMBER", help="GPUs of one node, as H100:8.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes (default: cluster.nodes).")]
Compare = Annotated[bool, typer.Option("--compare", help="Search the best layout; say why the others lose to it.")]
Why = Annotated[str | None, typer.Option("--why", metavar="LAYOUT", help="How tp=8,pp=4,... compares with the best.")]
Svg = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="Draw the pipeline's step as SVG.", parser=given_path),
]
Timeline = Annotated[bool, typer.Option("--timeline", help="Draw the pipeline's step in the terminal.")]
PriceFile = Annotated[
    Path | None,
    typer.Option("--prices", metavar="FILE", help="Prices and power of GPUs (TOML or JSON).", parser=given_path),
]


def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    world: World = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    compare: Compare = False,
    why: Why = None,
    svg: Svg = None,
    timeline: Timeline = False,
    prices: PriceFile = None,
    as_json: AsJson = False,
) -> None:
    """Count parameters, operations and memory of a job, say whether it fits its GPUs, how fast it runs, how often it is
    interrupted and what it costs. Where its layout does not fit the GPUs of --gpus and --nodes, the best one is
    searched."""
    from phalanx.planner.automatic import Chosen, choose
    from phalanx.planner.job_search import gpu_of
    from phalanx.planner.prices import load_prices
    from phalanx.spec import load_job

    known_prices = load_prices(prices)
    settings = [*(overrides or ()), *cluster_settings(gpus, nodes)]
    refused = None
    try:
        job = load_job(job_file, settings, world, check_world=True)
        chosen = choose(job, world or job.cluster.world_size)
    except PhalanxError as error:
        if not (gpus or nodes or compare or why is not None):
            raise
        chosen, refused = Chosen(load_job(job_file, [*settings, *FREE_LAYOUT], world, check_world=True)), error
    check_number(world, chosen.job, stated=gpus is not None or nodes is not None)
    found = make_plan(chosen.job, world or chosen.job.cluster.world_size)
    asked = None
    if why is not None:
        asked = load_job(job_file, [*settings, *layout_settings(why)], world, check_world=True)
    replaced = bool(gpus or nodes) and found.fits is False and gpu_of(chosen.job) is not None
    report = Report(chosen, found, refused, known_prices, asked, searched=compare or replaced or refused is not None)
    _ = report.best, report.own, report.compared  # what can't be planned is told before anything is printed
    if svg is not None or timeline:
        report.need_gpu()
    if svg is not None:
        write_svg(svg, report.shown.estimate, job_file)
    if as_json:
        print_json(report.as_dict())
    else:
        show(report, timeline=timeline)


class Report:
    """What one call of the command found; what it does not print is not computed."""

    def __init__(
        self,
        chosen: Chosen,
        found: Plan,
        refused: PhalanxError | None,
        prices: Prices,
        asked: Job | None,
        *,
        searched: bool,
    ) -> None:
        """refused: why the job's own layout is none for its GPUs; `chosen` and `found` are then of a free one. asked:
        the job with the layout of `--why`."""
        self.job, self.found, self.refused, self.prices, self.asked = chosen.job, found, refused, prices, asked
        self.said, self.searched = chosen.said, searched
        if searched or asked:
            self.need_gpu()

    def need_gpu(self) -> None:
        """Raises PhalanxError where no kind of GPU is known, without which there is no time."""
        from phalanx.planner.job_search import gpu_of

        if gpu_of(self.job) is None:
            cluster = self.job.cluster
            if cluster.device == "cuda" and cluster.gpu_memory_gib is not None:
                raise PhalanxError(
                    "cluster.gpu_memory_gib",
                    value=cluster.gpu_memory_gib,
                    expected="nothing: times are of the kinds that the planner knows, with their own memory",
                    remedy="remove it, and name the kind by cluster.gpu or --gpus",
                )
            raise PhalanxError(
                "cluster.gpu",
                value=self.job.cluster.gpu,
                expected="a job on GPUs of a kind that the planner knows",
                remedy="give them by --gpus, as H100:8",
            )

    @cached_property
    def search(self) -> Search | None:
        """None where no kind of GPU is known."""
        from phalanx.planner.job_search import gpu_of, model_shape, new_search, run_shape

        gpu = gpu_of(self.job)
        if gpu is None:
            return None
        return new_search(self.job, model_shape(self.job), run_shape(self.job), self.found.layout.world_size, gpu)

    def judged(self, estimate: Estimate) -> Judged:
        """An estimate as the job would run on it."""
        assert self.search is not None
        return judge(self.job, self.search, estimate, self.found.causal.model, self.prices)

    @cached_property
    def own(self) -> Judged | None:
        """The job's own layout; None where it does not fit its GPUs or they are not known."""
        from phalanx.planner.job_search import run_shape

        if self.refused is not None or self.search is None:
            return None
        return self.judged(self.search.estimate(candidate_of(self.found.layout, run_shape(self.job))))

    @cached_property
    def best(self) -> Judged | None:
        """The best layout, where it was asked for."""
        return self.judged(self.search.best) if self.searched and self.search is not None else None

    @cached_property
    def compared(self) -> Judged | None:
        """The layout of `--why`."""
        from phalanx.planner.job_search import run_shape

        if self.asked is None or self.search is None:
            return None
        layout = self.asked.layout(self.found.layout.world_size)
        return self.judged(self.search.estimate(candidate_of(layout, run_shape(self.asked))))

    @property
    def shown(self) -> Judged:
        """What is drawn: the layout of `--why`, else the best where it was searched, else the job's own."""
        shown = self.compared or self.best or self.own
        assert shown is not None
        return shown

    def as_dict(self) -> dict[str, Any]:
        """The plan as one JSON object; `as_dict` of its counts, and beside them what was asked for."""
        from phalanx.planner.rivals import parallel_section

        given = {"own": self.own, "why": self.compared, "best": self.best}
        compared = self.searched or self.asked is not None
        told = {name: judged.as_dict(compared=compared) for name, judged in given.items() if judged is not None}
        counts = as_dict(self.found)
        if self.refused is not None:  # sizes of the model stay; those of the free layout are nobody's
            counts |= {"refused": str(self.refused), "layout": None, "micro_batches": None, "memory": [], "fits": False}
        counts |= {"chosen": self.said} if self.said else {}
        if self.best is None:
            return {**counts, **told}
        section = parallel_section(self.best.estimate.candidate)
        return {**counts, **told, "rivals": rival_dicts(self.best.search), "parallel": section}


def make_plan(job: Job, world_size: int) -> Plan:
    """The plan of a job on `world_size` ranks. Raises PhalanxError for a model or a GPU that cannot be counted."""
    from phalanx import planner
    from phalanx.planner.job_search import model_shape, run_shape

    model, run, layout = model_shape(job), run_shape(job), job.layout(world_size)
    return Plan(
        layout=layout,
        parameters=planner.count_parameters(model),
        causal=planner.token_flops(model, run.seq_len, causal=True, recompute=run.products_again),
        full=planner.token_flops(model, run.seq_len, causal=False, recompute=run.products_again),
        micro_batches=planner.num_micro_batches(layout, run),
        tokens_per_step=run.global_batch_size * run.seq_len,
        memory=planner.rank_memory(model, layout, run, planner.RUNTIME_BYTES if job.cluster.device == "cuda" else 0),
        gpu_bytes=_gpu_bytes(job),
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
        "usable_bytes": found.usable_bytes,
        "fits": found.fits,
    }
