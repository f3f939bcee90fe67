"""The rest of `phalanx plan`: time and forecast of a layout, the best one, its rivals and why they lost."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import PhalanxError
from phalanx.core.files import write_output
from phalanx.core.numbering import numbered

if TYPE_CHECKING:
    from phalanx.planner import RunShape
    from phalanx.planner.forecast import Forecast
    from phalanx.planner.layouts import Candidate
    from phalanx.planner.prices import Prices
    from phalanx.planner.search import Estimate, Search
    from phalanx.spec import Job, Layout

# Every key of the layout as if nothing had been said of it.
FREE_LAYOUT = (
    "parallel.layout=given",
    "parallel.pp=1",
    "parallel.tp=1",
    "parallel.cp=1",
    "parallel.ep=1",
    "parallel.dp_replicate=1",
    "parallel.dp_shard=-1",
    "parallel.zero=3",
    "parallel.schedule=1f1b",
    "parallel.stages_per_rank=1",
    "parallel.stage_split=cost",
    "parallel.local_batch_size=1",
)
# Names that the printed layouts have for keys.
_PRINTED_AS = {"dp": "dp_shard", "micro-batch": "local_batch_size"}
_LAYOUT_KEYS = (*(setting.partition("=")[0].removeprefix("parallel.") for setting in FREE_LAYOUT[1:]), "recompute")


def cluster_settings(gpus: str | None, nodes: int | None) -> list[str]:
    """Overrides of `--gpus KIND:PER_NODE` and `--nodes`. Raises PhalanxError for another form or an unknown kind."""
    settings = [] if nodes is None else [f"cluster.nodes={nodes}"]
    if gpus is None:
        return settings
    from phalanx.planner.gpus import find_gpu

    kind, colon, count = gpus.partition(":")
    if colon and not numbered(count):
        raise PhalanxError(
            "--gpus",
            value=gpus,
            expected="a kind and a number for one node, such as H100:8",
            remedy="write KIND or KIND:NUMBER",
        )
    name = find_gpu(kind, "--gpus", "write KIND or KIND:NUMBER, as H100:8").name
    return [*settings, "cluster.device=cuda", f"cluster.gpu={name}", *([f"cluster.nproc={count}"] if count else [])]


def check_number(world: int | None, job: Job, *, stated: bool) -> None:
    """Raises PhalanxError for more ranks by `--world` than there are GPUs. stated: by `--gpus` or `--nodes`; else the
    number of ranks is all that counts."""
    if stated and world is not None and world > job.cluster.world_size:
        nodes = -(-world // job.cluster.nproc)
        raise PhalanxError(
            "--world",
            value=world,
            expected=f"at most {job.cluster.world_size} ranks on {job.cluster.nodes} nodes of {job.cluster.nproc} GPUs",
            remedy=f"leave --world out, or give --nodes {nodes}",
        )


def layout_settings(text: str) -> list[str]:
    """Overrides of `--why tp=8,pp=4,...`; what it does not name is 1 (2 stages a rank for a schedule of several),
    dp_shard the rest, and recompute the job's. Raises PhalanxError for a key that is none of the layout's, or that
    stands there twice, and where there is none."""
    from phalanx.spec.parallel import MULTI_STAGE_SCHEDULES

    settings, seen = list(FREE_LAYOUT), set[str]()
    for part in (each.strip() for each in text.split(",")):
        key, _, value = (each.strip() for each in part.partition("="))
        key = _PRINTED_AS.get(key, key)
        if key not in _LAYOUT_KEYS or not value or key in seen:
            raise PhalanxError(
                "--why",
                value=part,
                expected=f"KEY=VALUE with a key of {', '.join(_LAYOUT_KEYS)}, each once at most",
                remedy=_remedy(key),
            )
        seen.add(key)
        if key == "schedule" and value in MULTI_STAGE_SCHEDULES and "stages_per_rank" not in seen:
            settings.append("parallel.stages_per_rank=2")
        settings.append(f"activation_checkpoint.mode={value}" if key == "recompute" else f"parallel.{key}={value}")
    return settings


def _remedy(key: str) -> str:
    if key in _LAYOUT_KEYS:
        return f"give it one value, as {key}=..."
    close = difflib.get_close_matches(key.lower(), _LAYOUT_KEYS, n=1)
    return f"did you mean {close[0]}?" if close else "name one of them, as tp=8,pp=4"


@dataclass(frozen=True)
class Judged:
    """A layout with its time, how full its fullest GPU is, and what the job comes to on it."""

    search: Search
    estimate: Estimate
    forecast: Forecast

    def as_dict(self, *, compared: bool) -> dict[str, Any]:
        """For `--json`: plain numbers, names with units. compared: with why it is not the best, which is searched."""
        from phalanx.planner.forecast import assumptions
        from phalanx.planner.rivals import why_not

        candidate, step = self.estimate.candidate, self.estimate.step
        told = {
            "layout": asdict(candidate.layout),
            "run": asdict(candidate.run),
            "step": {**asdict(step), "total_s": step.total_s},
            "memory_bytes": self.search.memory(candidate).total_bytes,
            "fits": self.search.fits(candidate),
            "forecast": asdict(self.forecast),
            "assumed": assumptions(self.search.task.cluster.gpu.name),
        }
        return {**told, "why": why_not(self.search, self.estimate)} if compared else told


def judge(job: Job, search: Search, estimate: Estimate, flops_per_token: float, prices: Prices) -> Judged:
    """A layout of a search as this job would run on it."""
    from phalanx.planner.forecast import forecast

    gpu, step_s = search.task.cluster.gpu, estimate.step.total_s
    seen = forecast(
        gpu=gpu.name,
        gpus=search.task.gpus,
        peak_tflops=gpu.bf16_tflops,
        step_s=step_s,
        tokens_per_step=estimate.tokens,
        steps=job.training.steps,
        flops_per_token=flops_per_token,
        checkpoint_steps=job.checkpoint.interval,
        state_bytes=search.memory(estimate.candidate).state_bytes,
        prices=prices,
    )
    return Judged(search, estimate, seen)


def candidate_of(layout: Layout, run: RunShape) -> Candidate:
    """A job's layout as the search sees it."""
    from phalanx.planner.layouts import Candidate

    return Candidate(layout, run if layout.pp > 1 else replace(run, schedule="1f1b", stages_per_rank=1))


def lines(judged: Judged, job: Job) -> Iterator[str]:
    """A layout's time, memory, failures and cost, for people."""
    from phalanx.planner.forecast import assumptions
    from phalanx.planner.rivals import memory_line, step_line
    from phalanx.planner.timeline import seconds

    step, seen, search = judged.estimate.step, judged.forecast, judged.search
    memory = search.memory(judged.estimate.candidate)
    yield (
        f"time: {seconds(step.total_s)} a step, {seen.tokens_per_s:,.0f} tokens/s, "
        f"{seen.tokens_per_s / search.task.gpus:,.0f} a GPU, {seen.mfu:.1%} MFU"
    )
    yield f"of it: {step_line(step)}"
    yield f"memory: {memory_line(memory, search.task.cluster.gpu.memory_bytes)}"
    best_steps = max(1, round(seen.best_interval_s / step.total_s))
    interval = min(job.checkpoint.interval, job.training.steps)
    best = "step" if best_steps == 1 else f"{best_steps:,} steps"
    yield (
        f"failures: one in {seen.mtbf_h:,.1f} h; a checkpoint every {interval:,} steps keeps "
        f"{seen.ettr:.1%} of the time, every {best} {seen.best_ettr:.1%}"
    )
    yield _cost_line(judged, job.training.steps)
    yield f"assumed: {'; '.join(assumptions(search.task.cluster.gpu.name))}"


def _cost_line(judged: Judged, steps: int) -> str:
    from phalanx.planner.cost import dollars

    seen, tokens = judged.forecast, judged.estimate.tokens * steps
    if seen.cost is None:
        training_days = _short(tokens / seen.tokens_per_s / 86_400)
        why = f"cost: {seen.unpriced}" if seen.finishes else seen.unpriced
        return f"{steps:,} steps: {training_days} days of training; {why}"
    cost, usd = seen.cost, seen.cost.usd
    days = f"{_short(cost.training_days)} days of training, {_short(cost.wall_days)} in all"
    price = f"{dollars(usd.middle)} ({dollars(usd.low)} to {dollars(usd.high)})"
    spent = f"{_short(cost.gpu_hours)} GPU-hours, {price}, {_short(cost.energy_mwh)} MWh"
    return f"{steps:,} steps, {_short(tokens / 1e9)} B tokens: {days}, {spent}"


def _short(value: float) -> str:
    """Three digits, and all of those before the point while somebody can read them."""
    return f"{value:,.0f}" if 100 <= value < 1e12 else f"{value:.3g}"


def rival_rows(search: Search) -> list[tuple[str, str, str]]:
    """(what is different, the best layout with it, why it lost)."""
    from phalanx.planner.rivals import layout_line, rivals

    return [(", ".join(each.properties), layout_line(each.candidate), each.reason) for each in rivals(search)]


def write_svg(path: Path, estimate: Estimate, job_file: Path) -> None:
    """Writes the timeline of a step. Raises PhalanxError where the file can't be written, or is the job's own."""
    from phalanx.planner.search import pipeline_run
    from phalanx.planner.timeline import svg

    drawn = svg(pipeline_run(estimate)).encode()
    try:
        if path.exists() and path.samefile(job_file):
            raise PhalanxError("--svg", value=str(path), expected="another file than the job's", remedy="name another")
        write_output(path, drawn)
    except OSError as error:
        raise PhalanxError(
            "--svg", value=str(path), expected="a file that can be written", remedy=f"{error.strerror}; name another"
        ) from error


def rival_dicts(search: Search) -> list[Mapping[str, Any]]:
    """For `--json`."""
    from phalanx.planner.rivals import rivals

    return [
        {
            "properties": each.properties,
            "layout": asdict(each.candidate.layout),
            "run": asdict(each.candidate.run),
            "step_s": None if each.estimate is None else each.estimate.step.total_s,
            "memory_bytes": each.memory.total_bytes,
            "reason": each.reason,
        }
        for each in rivals(search)
    ]
