"""`phalanx doctor --nproc`: what is asked of the network between ranks, and how what was found is shown."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.output import print_table
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.fabric.plan import Plan
    from phalanx.fabric.report import Report
    from phalanx.gang import GangOutcome
    from phalanx.spec import Job, Layout

MOST_RANKS = 256
MOST_BYTES = 16 << 30
# With more ranks the table of pairs shows the slow ones only.
MOST_PAIRS_SHOWN = 28
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command that concern the network, as they were given. launched: ranks that torchrun started,
    this process among them.
    """

    job: Path | None
    nproc: int | None
    device: str | None
    parallel: str | None
    overrides: Sequence[str]
    min_size: str
    max_size: str
    deadline_s: float
    launched: int | None = None

    @property
    def num_ranks(self) -> int | None:
        """As given, or as there are; None where the job says."""
        return self.launched or self.nproc

    @property
    def is_wanted(self) -> bool:
        """Whether anything about the network was asked; raises PhalanxError where an option has nothing to act on."""
        if self.launched is not None and self.nproc not in (None, self.launched):
            expected = f"the {self.launched} ranks that torchrun started"
            raise PhalanxError("--nproc", value=self.nproc, expected=expected, remedy="leave it out")
        if self.num_ranks is not None or self.job is not None:
            return True
        for name, value in (("--parallel", self.parallel), ("--device", self.device)):
            if value is not None:
                raise PhalanxError(
                    name, value=value, expected="it beside --nproc or a job file", remedy="add --nproc N"
                )
        if self.overrides:
            expected = "it beside a job file"
            raise PhalanxError("--set", value=self.overrides[0], expected=expected, remedy="name the job file")
        return False


def plan_of(asked: Asked) -> Plan:
    """What is to be measured. Raises PhalanxError (or Problems) for whatever the user must change."""
    from phalanx.fabric.plan import BY_HAND, OPERATIONS, Plan, sizes_between
    from phalanx.spec.job import plain

    least, most = size_of("--min-size", asked.min_size), size_of("--max-size", asked.max_size)
    if least > most:
        raise PhalanxError("--min-size", value=asked.min_size, expected="at most --max-size", remedy="lower it")
    if not 0 < asked.deadline_s < float("inf"):
        raise PhalanxError("--deadline", value=asked.deadline_s, expected="seconds above 0", remedy="correct it")
    job = _job(asked)
    layout = _layout(asked, job)
    num_ranks = layout.world_size
    if not 2 <= num_ranks <= MOST_RANKS:
        raise PhalanxError(
            "--nproc", value=num_ranks, expected=f"from 2 to {MOST_RANKS} ranks on this machine", remedy="correct it"
        )
    device = asked.device or (job.cluster.device if job is not None else "cpu")
    if device not in ("cpu", "cuda"):
        raise PhalanxError("--device", value=device, expected="cpu or cuda", remedy="correct it")
    # Without a GPU a message takes a core at each end: pairs that shared cores would show the cores, not the links.
    cores = len(os.sched_getaffinity(0))
    at_once = num_ranks // 2 if device == "cuda" else max(1, min(num_ranks, cores) // 2)
    return Plan(
        layout,
        device,
        sizes_between(least, most),
        OPERATIONS if device == "cuda" else (*OPERATIONS, *BY_HAND),
        pairs_at_once=at_once,
        deadline_s=asked.deadline_s,
        network=None if job is None else plain(job.cluster.network),
    )


def size_of(where: str, text: str) -> int:
    """Bytes of a size as 64KiB."""
    match = re.fullmatch(r"(\d{1,12})\s*([KMG]iB|B)?", text.strip(), re.IGNORECASE)
    num_bytes = int(match[1]) * _UNITS[(match[2] or "").upper()] if match else 0
    if not 4 <= num_bytes <= MOST_BYTES:
        raise PhalanxError(where, value=text, expected="4 B to 16 GiB, as 64KiB or 16MiB", remedy="correct it")
    return num_bytes


def _job(asked: Asked) -> Job | None:
    from phalanx.spec import load_job

    if asked.job is None:
        if asked.overrides:
            remedy = "name the job file, or give the axes by --parallel"
            raise PhalanxError("--set", value=asked.overrides[0], expected="it beside a job file", remedy=remedy)
        return None
    if asked.parallel is not None:
        remedy = "use --set parallel.tp=2"
        raise PhalanxError("--parallel", value=asked.parallel, expected="no job file beside it", remedy=remedy)
    return load_job(asked.job, asked.overrides)


def _layout(asked: Asked, job: Job | None) -> Layout:
    if job is None:
        assert asked.num_ranks is not None
        return _layout_of(asked.parallel or "", asked.num_ranks)
    from phalanx.planner.automatic import choose

    if asked.num_ranks is None and job.cluster.nodes != 1:
        raise PhalanxError(
            "cluster.nodes",
            value=job.cluster.nodes,
            expected="1, since `phalanx doctor` starts ranks on this machine only",
            remedy="give their number by --nproc and axes that fit it by --set, or start it by torchrun on every node",
        )
    num_ranks = asked.num_ranks or job.cluster.world_size
    return choose(job, num_ranks).job.layout(num_ranks)


def _layout_of(text: str, num_ranks: int) -> Layout:
    """The layout of axes as tp=2,pp=2; dp_shard takes what they leave."""
    from phalanx.spec.checks import resolve_axes
    from phalanx.spec.parallel import AXES, Parallel

    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not re.fullmatch(r"[1-9]\d{0,5}", size):
            expected = f"axes with their sizes as tp=2,pp=2 ({', '.join(AXES)}), each once"
            raise PhalanxError("--parallel", value=text, expected=expected, remedy="correct it")
        sizes[axis] = int(size)
    layout = resolve_axes(Parallel.model_validate(sizes), num_ranks)
    if layout is None or layout.world_size != num_ranks:
        expected = f"sizes that multiply to the {num_ranks} ranks of --nproc, or divide them where dp_shard is left out"
        raise PhalanxError("--parallel", value=text, expected=expected, remedy="change a size, or --nproc")
    return layout


def measure_network(plan: Plan, console: Console) -> tuple[GangOutcome, Report | None]:
    """Measures, with its progress on the console."""
    from phalanx.cli.counting import counting
    from phalanx.fabric.run import PRELOAD, Hooks, measure, num_phases
    from phalanx.gang import ForkServer, StopSignals

    done, total = 0, num_phases(plan)
    with StopSignals() as stop, counting(console) as observe, ForkServer(PRELOAD) as server:

        def on_phase(name: str) -> None:
            nonlocal done
            done = min(done + 1, total)
            observe("measuring", done, total)

        return measure(plan, server, Hooks(on_phase), stop=stop)


def measure_launched_network(plan: Plan, console: Console) -> tuple[GangOutcome, Report | None]:
    """Measures as one of torchrun's ranks; the report on rank 0 alone."""
    from phalanx.cli.counting import counting
    from phalanx.fabric.launched import measure_launched
    from phalanx.gang import GangOutcome

    done = 0
    with counting(console) as observe:

        def on_phase(name: str) -> None:
            nonlocal done
            done += 1
            observe("measuring", done, plan.num_phases)

        return GangOutcome("ok", None, ()), measure_launched(plan, on_phase)


def exit_code(outcome: GangOutcome, report: Report | None) -> int:
    """0 where nothing is slow, 1 where a pair or rank is, or a rank failed (told on stderr), 2 for a user's mistake,
    130 after a signal.
    """
    if report is not None:
        return 1 if report.slow_pairs or report.slow_ranks else 0
    cause = outcome.first_cause
    assert cause is not None, "a run without a report has a cause"
    if outcome.state == "stopped":
        return 130
    is_mistake = cause.kind == "user_error"
    sys.stderr.write(f"phalanx: {cause.message if is_mistake else f'the measurement failed: {cause}'}\n")
    return 2 if is_mistake else 1


def as_json(plan: Plan, outcome: GangOutcome, report: Report | None) -> dict[str, Any]:
    """Times in microseconds, bandwidths in 10^9 bytes a second."""
    told: dict[str, Any] = {
        "state": outcome.state,
        "backend": plan.backend,
        "world_size": plan.world_size,
        "layout": asdict(plan.layout),
    }
    if report is None:
        cause = outcome.first_cause
        return told | {"cause": None if cause is None else {"kind": cause.kind, "rank": cause.rank, "said": str(cause)}}
    slow = set(report.slow_pairs)
    return told | {
        "measurements": [
            {
                "axis": each.axis,
                "operation": each.operation,
                "num_bytes": each.num_bytes,
                "num_ranks": each.num_ranks,
                "time_us": each.time_s * 1e6,
                "algorithm_gb_s": each.algorithm_gb_s,
                "bus_gb_s": each.bus_gb_s,
                "iterations": each.iterations,
                "slowest": each.slowest,
            }
            for each in report.measurements
        ],
        "lines": [
            {
                "axis": axis,
                "operation": operation,
                "latency_us": line.latency_s * 1e6,
                "gb_s": line.gb_s,
                "error": line.error,
            }
            for axis, operation, line in report.lines()
        ],
        "crossings": {axis: asdict(each) for axis, each in report.crossings.items()},
        "pairs": [
            {
                "ranks": each.ranks,
                "latency_us": each.latency_s * 1e6,
                "time_us": each.time_s * 1e6,
                "gb_s": each.gb_s,
                "is_slow": each.ranks in slow,
            }
            for each in report.pairs
        ],
        "slow_pairs": report.slow_pairs,
        "slow_ranks": report.slow_ranks,
        "said": report.said(),
    }


def show(report: Report) -> None:
    """Tables of each axis and of the pairs, the crossing of ring and tree, and the verdict."""
    from rich.console import Console

    from phalanx.fabric.figures import size_text
    from phalanx.fabric.plan import BY_HAND

    plan, console = report.plan, Console()
    columns = ("operation", "size", "time us", "algorithm GB/s", "bus GB/s", "slowest ranks")
    for axis in dict.fromkeys(each.axis for each in report.measurements):
        rows = [
            (
                each.operation,
                size_text(each.num_bytes),
                _us(each.time_s),
                each.algorithm_gb_s,
                each.bus_gb_s,
                each.slowest,
            )
            for each in report.measurements
            if each.axis == axis and each.operation not in BY_HAND
        ]
        print_table(columns, rows, f"{axis} ({plan.backend})")
    lines = [
        (axis, operation, _us(line.latency_s), line.gb_s or "no limit seen", f"{line.error:.0%}")
        for axis, operation, line in report.lines()
    ]
    print_table(("axis", "operation", "latency us", "GB/s", "at most off by"), lines, "time = latency + size / GB/s")
    for axis, found in report.crossings.items():
        console.print(f"{axis}: all-reduce: {found.said}", markup=False, highlight=False, soft_wrap=True)
    if report.pairs:
        _show_pairs(report, console)


def _us(time_s: float) -> float:
    """Microseconds, whole ones where there are many."""
    return round(time_s * 1e6) if time_s >= 1e-4 else time_s * 1e6


def _show_pairs(report: Report, console: Console) -> None:
    slow = {rank for pair in report.slow_pairs for rank in pair} | set(report.slow_ranks)
    is_short = len(report.pairs) <= MOST_PAIRS_SHOWN
    rows = [
        (f"{each.ranks[0]}-{each.ranks[1]}", _us(each.latency_s), each.gb_s)
        for each in report.pairs
        if is_short or set(each.ranks) & slow
    ]
    if rows:
        print_table(("ranks", "latency us", "GB/s"), rows, "pairs" if is_short else "pairs of slow ranks")
    style = "red" if slow else "green"
    for sentence in report.said():
        console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)
