"""`phalanx doctor`: what this machine has, and what a store can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.output import print_facts, print_json, print_table
from phalanx.cli.places import given

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
    deadline_s: Annotated[
        float, typer.Option("--deadline", help="Seconds that one call to the store may take.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what this machine has and, with --storage, try what a store can do.

    Exit code 1 where the store can not promise what Phalanx needs, 2 where it refuses us.
    """
    facts = machine_facts()
    report = None
    if storage is not None:
        from phalanx.objects import StorageSettings, open_store
        from phalanx.objects.probe import probe

        report = probe(open_store(storage, StorageSettings(endpoint, region, profile=profile), deadline_s))
    if as_json:
        print_json(_as_json(facts, report))
    else:
        _show(facts, report)
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
