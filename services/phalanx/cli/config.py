"""`phalanx config show | check`: what a job file says once presets, defaults and overrides are in, and whether it can
run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.output import print_json
from phalanx.cli.places import given_path
from phalanx.core.errors import PhalanxError, Problems

if TYPE_CHECKING:
    from phalanx.planner.paging import Paging
    from phalanx.spec import Job, Layout
    from phalanx.spec.network import Setting

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).", show_default=False, parser=given_path)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be given again.", show_default=False),
]
Partial = Annotated[
    list[str] | None,
    typer.Option(
        "--partial",
        metavar="TENSOR",
        help="A tensor that may be missing in the checkpoint or in the job; may be given again.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
World = Annotated[
    int | None, typer.Option("--world", min=1, help="Number of ranks (default: cluster.nproc x cluster.nodes).")
]


def with_partial(overrides: Sequence[str] | None, partial: Sequence[str] | None) -> list[str]:
    """The overrides of a job file, and the one that says which tensors a restore may leave out. Raises PhalanxError for
    a name that is blank, and where an override names them too.
    """
    if any(not each.strip(" ,") for each in partial or ()):
        raise PhalanxError(
            "--partial", value="", expected="the name of a tensor", remedy="name one, or leave the option out"
        )
    other = next((each for each in overrides or () if each.partition("=")[0].strip() == "checkpoint.partial"), None)
    if partial and other is not None:
        raise PhalanxError(
            "--set",
            value=other,
            expected="no --partial beside it, which says the same key",
            remedy="give one of the two",
        )
    named = [f"checkpoint.partial={json.dumps(','.join(partial))}"] if partial else []
    return [*(overrides or ()), *named]


def register(app: typer.Typer) -> None:
    """Adds the `config` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Show or check a job file.")
    group.command("show")(show)
    group.command("check")(check)
    app.add_typer(group, name="config")


def show(
    job_file: JobFile,
    overrides: Overrides = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Fill in presets and defaults.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the job file with its overrides applied, as TOML or JSON."""
    from phalanx.spec import parse_job
    from phalanx.spec.job import plain
    from phalanx.spec.source import apply_overrides, read_toml
    from phalanx.spec.toml import toml_text

    tables = apply_overrides(read_toml(job_file), overrides or ())
    job = parse_job(tables, where=str(job_file))
    shown = plain(job) if resolved else tables
    if as_json:
        print_json(shown)
    else:
        typer.echo(toml_text(shown), nl=False)


def check(job_file: JobFile, overrides: Overrides = None, world: World = None, as_json: AsJson = False) -> None:
    """Name every mistake of a job file at once, also those that depend on the number of ranks; exit 2 if there is
    one."""
    from phalanx.planner.automatic import choose
    from phalanx.spec import load_job
    from phalanx.spec.effects import without_effect

    try:
        job = load_job(job_file, overrides or (), world, check_world=True)
        chosen = choose(job, world or job.cluster.world_size)
    except PhalanxError as error:
        if not as_json:
            raise
        print_json({"ok": False, "problems": _as_rows(error)})
        raise typer.Exit(2) from None
    world_size = world or job.cluster.world_size
    layout = chosen.job.layout(world_size)
    network, paging = _network(job), _paging(chosen.job, layout)
    warnings = (*without_effect(chosen.job, layout), *network.warnings)
    if as_json:
        said = {"chosen": chosen.said} if chosen.said else {}
        shown: dict[str, object] = {"network": [asdict(each) for each in network.settings]} if network.settings else {}
        shown |= {"optimizer_on_disk": asdict(paging)} if paging is not None else {}
        print_json(
            {"ok": True, "world_size": world_size, "layout": asdict(layout), "warnings": warnings, **said, **shown}
        )
        return
    if chosen.said:
        typer.echo(chosen.said, err=True)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    axes = " x ".join(f"{axis} {size}" for axis, size in asdict(layout).items() if size > 1 and axis != "ep") or "1"
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    typer.echo(f"{job_file}: good for {world_size} ranks ({axes}{experts}); data and model are looked at when it runs")
    if layout.pp > 1 and chosen.job.model.class_ is None:
        from phalanx.cli.plan_show import stages_line

        typer.echo(stages_line(chosen.job, layout))
    if paging is not None:
        typer.echo(paging.said)
    for each in network.settings:
        typer.echo(f"{each.variable}={each.value} by {each.key or 'the environment of this command'}")


def _paging(job: Job, layout: Layout) -> Paging | None:
    """What its optimizer state takes on disks; of a user's model that is known when it runs."""
    from phalanx.planner.paging import paging_of

    return None if job.model.class_ is not None else paging_of(job, layout)


@dataclass(frozen=True, slots=True)
class _Network:
    """What NCCL would be told of the network, were the job started from here."""

    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()


def _network(job: Job) -> _Network:
    from phalanx.spec.network import disagreements, settings_of

    if job.cluster.device != "cuda":
        return _Network()
    network = job.cluster.network
    return _Network(settings_of(network, os.environ), disagreements(network, os.environ))


def _as_rows(error: PhalanxError) -> list[dict[str, object]]:
    problems = error.problems if isinstance(error, Problems) else (error,)
    return [
        {"where": each.where, "value": each.value, "expected": each.expected, "remedy": each.remedy}
        for each in problems
    ]
