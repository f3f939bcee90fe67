"""`phalanx doctor`: what this machine has, what a store can do, and what the network between ranks gives."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import Overrides
from phalanx.cli.doctor_network import Asked, exit_code, measure_launched_network, measure_network, plan_of
from phalanx.cli.doctor_network import as_json as network_json
from phalanx.cli.doctor_network import show as show_network
from phalanx.cli.output import print_facts, print_json, print_table
from phalanx.cli.places import given, given_path

if TYPE_CHECKING:
    from phalanx.objects.probe import ProbeReport

VERDICTS = {
    "full": "full: commits are safe even when several programs write here at once",
    "single-writer": "single-writer: no working create-only put, so only one run of a job at a time is safe here; "
    "of a submitted job the checkpoint service's database decides which commits count",
    "unusable": "unusable: bytes written here are not safe",
}
PUTS_WHOLE = "weaker mode: uploads in parts are not create-only, so each object is one put, of at most 5 GiB"


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What training here has to work with. torch: installed version or None. cores: those this process may use."""

    phalanx: str | None
    python: str
    platform: str
    torch: str | None
    cores: int
    memory_bytes: int
    memory_available_bytes: int


def machine_facts() -> MachineFacts:
    """Reads the facts without importing torch."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return MachineFacts(
        phalanx=_version("phalanx"),
        python=platform.python_version(),
        platform=platform.platform(),
        torch=_version("torch"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=page_bytes * os.sysconf("SC_PHYS_PAGES"),
        memory_available_bytes=page_bytes * os.sysconf("SC_AVPHYS_PAGES"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor(
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a store to try, with real objects that are removed again.", parser=given
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 endpoint, as in [storage.NAME].", parser=given)
    ] = None,
    region: Annotated[str | None, typer.Option(help="S3 region, as in [storage.NAME].")] = None,
    profile: Annotated[str | None, typer.Option(help="AWS profile, as in [storage.NAME].")] = None,
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB]", help="Job file whose layout, device and network count.", parser=given_path),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Measure the network between so many ranks on this machine.", min=2)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (overrides cluster.device).")] = None,
    parallel: Annotated[
        str | None, typer.Option(metavar="AXES", help="Axes of the mesh without a job file, as tp=2,pp=2.")
    ] = None,
    set_: Overrides = None,
    min_size: Annotated[str, typer.Option(metavar="SIZE", help="Least size of a collective.")] = "1KiB",
    max_size: Annotated[str, typer.Option(metavar="SIZE", help="Greatest size of a collective.")] = "16MiB",
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline", help="Seconds that one call to the store or one measurement of the network may take."
        ),
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what this machine has; with --storage, try what a store can do; with --nproc or a job file, start ranks and
    measure collectives over each axis of their mesh and every pair of them.

    Exit code 1 where the store can not promise what Phalanx needs, a pair of ranks is slow or a rank fails, 2 where the
    store refuses us.
    """
    from rich.console import Console

    from phalanx.fabric.launched import launched_world

    launched = launched_world(os.environ)
    asked = Asked(job, nproc, device, parallel, set_ or (), min_size, max_size, deadline_s, launched)
    plan = plan_of(asked) if asked.is_wanted else None
    if plan is not None and launched is not None and os.environ["RANK"] != "0":
        measure_launched_network(plan, Console(stderr=True, quiet=True))
        return
    facts = machine_facts()
    report: ProbeReport | None = None
    if storage is not None:
        from phalanx.objects import StorageSettings, open_store
        from phalanx.objects.probe import probe

        report = probe(open_store(storage, StorageSettings(endpoint, region, profile=profile), deadline_s))
    outcome, found = None, None
    if plan is not None and launched is not None:
        outcome, found = measure_launched_network(plan, Console(stderr=True))
    elif plan is not None:
        outcome, found = measure_network(plan, Console(stderr=True))
    if as_json:
        network = {} if plan is None or outcome is None else {"network": network_json(plan, outcome, found)}
        print_json({**_as_json(facts, report), **network})
    else:
        _show(facts, report)
        if found is not None:
            show_network(found)
    if outcome is not None and (code := exit_code(outcome, found)):
        raise typer.Exit(code)
    if report is not None and report.promise != "full":
        raise typer.Exit(1)


def _as_json(facts: MachineFacts, report: ProbeReport | None) -> dict[str, object]:
    storage = None if report is None else asdict(report) | {"promise": report.promise, "puts_whole": report.puts_whole}
    return {"machine": asdict(facts), "storage": storage}


def _show(facts: MachineFacts, report: ProbeReport | None) -> None:
    print_facts(_machine_rows(facts), "this machine")
    if report is not None:
        print_table(("", "works", "seen"), _probe_rows(report), report.url)
        typer.secho(VERDICTS[report.promise], fg="green" if report.promise == "full" else "red")
        if report.puts_whole:
            typer.secho(PUTS_WHOLE, fg="yellow")


def _machine_rows(facts: MachineFacts) -> dict[str, object]:
    return {
        "phalanx": facts.phalanx or "not installed as a package",
        "python": facts.python,
        "platform": facts.platform,
        "torch": facts.torch or "not installed: pip install 'phalanx[train]'",
        "cores": facts.cores,
        "memory": f"{facts.memory_bytes / 2**30:.1f} GiB, {facts.memory_available_bytes / 2**30:.1f} GiB free",
    }


def _probe_rows(report: ProbeReport) -> list[tuple[object, ...]]:
    from rich.text import Text

    marks = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("-")}
    latency = f"create {report.create_s * 1e3:.1f} ms, read {report.read_s * 1e3:.1f} ms (median)"
    return [*((check.name, marks[check.ok], check.detail) for check in report.checks), ("latency", "-", latency)]


def register(app: typer.Typer) -> None:
    """Adds `doctor` to the command line."""
    app.command("doctor")(doctor)
