"""`phalanx up | down | status`: the services and an agent on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.output import print_facts, print_json, print_table
from phalanx.cli.places import given, given_path
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.home.layout import Home
    from phalanx.home.make import HomeSettings
    from phalanx.home.state import HomeState

HomeFolder = Annotated[
    str,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Folder of certificates, tokens, configurations, databases, logs.",
        parser=given,
    ),
]
_DEFAULT_HOME = "phalanx-home"
_NOT_UP, _LOST = 1, 1
_MAX_SLOTS, _MAX_S, _NO_GRACE_S = 65_536, 1e8, 0.001


def _seconds(value: float | None) -> float | None:
    """Refuses what is no time."""
    if value is not None and not value <= _MAX_S:  # NaN too
        raise typer.BadParameter(f"{value} is no number of seconds up to {_MAX_S:g}")
    return value


def register(app: typer.Typer) -> None:
    """Adds the three commands."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(
    home: HomeFolder = _DEFAULT_HOME,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Root of the cluster's registry (default: a folder in the home).", parser=given
        ),
    ] = None,
    storage_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 server other than AWS.", parser=given)
    ] = None,
    storage_region: Annotated[str, typer.Option(help="Region of the bucket.")] = "",
    host: Annotated[str, typer.Option(help="Address that the services listen on.")] = "127.0.0.1",
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Another host name or address of this machine, for certificates.")
    ] = None,
    port_base: Annotated[
        int, typer.Option(help="Port of the monitor's page; the services' follow. 0 takes free ones and keeps them.")
    ] = 7700,
    page_password: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=given_path,
            help="File (mode 0600) with the page's password; without one the page is on a loopback address.",
        ),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=_MAX_SLOTS, help="Ranks that may run here (default: GPUs, or CPUs).")
    ] = None,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Services only; no ranks run on this machine.")] = False,
    dcgm: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="dcgm-exporters to read GPUs from.")] = "",
    agent_grace: Annotated[
        float,
        typer.Option(
            min=0,
            callback=_seconds,
            help="Seconds that ranks get to commit when all is ended, where their job does not say fewer.",
        ),
    ] = 120.0,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once everything is up.")] = False,
    wait: Annotated[
        float, typer.Option(min=1, callback=_seconds, help="Seconds for everything to be up, with --detach.")
    ] = 60.0,
    init_only: Annotated[bool, typer.Option("--init-only", help="Make the home folder and start nothing.")] = False,
    as_json: AsJson = False,
) -> int:
    """Start the services (data, train, checkpoint, monitor) and an agent here, and keep them alive."""
    from phalanx.client import absolute_url
    from phalanx.home.folder import home_of, using
    from phalanx.home.make import HomeSettings, check_settings, with_slots
    from phalanx.objects import StorageSettings

    _refuse_both(detach, init_only)
    place = home_of(home)
    settings = HomeSettings(
        storage=absolute_url(storage or ""),
        storage_settings=StorageSettings(endpoint=storage_endpoint, region=storage_region or None),
        host=host,
        hosts=tuple(name or ()),
        port_base=port_base,
        page_password=page_password,
        options={
            "agent": {"stop_grace_s": max(agent_grace, _NO_GRACE_S)},
            **({"monitor": {"dcgm": dcgm}} if dcgm else {}),
        },
    )
    settings = with_slots(settings, slots)
    with using(place):
        check_settings(settings)
        if detach:
            return _up_detached(place, wait, as_json=as_json)
        if init_only:
            _make(place, settings)
            facts = {"home": str(place.folder), "context": str(place.client)}
            print_json(facts) if as_json else print_facts(facts, "home")
            return 0
        return _up(place, settings, with_agent=not no_agent, agent_grace_s=agent_grace, as_json=as_json)


def _refuse_both(detach: bool, init_only: bool) -> None:
    if detach and init_only:
        raise PhalanxError(
            "--detach", expected="no --init-only beside it, which starts nothing", remedy="leave one of them out"
        )


def _make(home: Home, settings: HomeSettings) -> None:
    from phalanx.home.make import make_home
    from phalanx.home.state import held

    with held(home):
        make_home(home.folder, settings)


def _up(home: Home, settings: HomeSettings, *, with_agent: bool, agent_grace_s: float, as_json: bool) -> int:
    """In the foreground, until SIGINT or SIGTERM."""
    from phalanx.gang import StopSignals
    from phalanx.home.addresses import refuse_taken_ports
    from phalanx.home.layout import AGENT, SERVICES
    from phalanx.home.left import end_left
    from phalanx.home.make import make_home
    from phalanx.home.state import begin, held
    from phalanx.home.supervisor import Supervisor, commands_of

    was_ready = False

    def on_change(state: HomeState) -> None:
        nonlocal was_ready
        if as_json:
            if state.ready and not was_ready:
                print_json(asdict(state))
                sys.stdout.flush()
        else:
            _tell(state)
            if state.ready and not was_ready:
                sys.stderr.write(f"everything is up; the page: {state.page_url}\n")
        was_ready = state.ready

    names = (*SERVICES, AGENT) if with_agent else SERVICES
    with StopSignals() as stop, held(home):
        begin(home, agent_grace_s)
        end_left(home, _say, lambda: bool(stop.count))
        _, addresses = make_home(home.folder, settings)
        refuse_taken_ports(addresses, names)
        supervisor = Supervisor(home, addresses, commands_of(home, names, agent_grace_s), agent_grace_s)
        supervisor.run(stop, on_change)
    return _told_lost(supervisor.lost)


def _say(line: str) -> None:
    sys.stderr.write(f"phalanx: {line}\n")
    sys.stderr.flush()


def _told_lost(lost: Sequence[str]) -> int:
    """Tells what ranks did not commit; the exit code."""
    for line in lost:
        _say(line)
    return _LOST if lost else 0


def _tell(state: HomeState) -> None:
    words = [
        f"{each.name} {'up' if each.ready else 'starting' if each.pid else each.last_exit or 'ended'}"
        + (f" ({each.restarts} restarts)" if each.restarts else "")
        for each in state.processes
    ]
    sys.stderr.write(", ".join(words) + "\n")


def _up_detached(home: Home, wait_s: float, *, as_json: bool) -> int:
    """The same command without `--detach`, in a session of its own."""
    from phalanx.home.detached import start_detached, wait_ready
    from phalanx.home.left import end_left
    from phalanx.home.state import is_held, is_up

    if is_held(home):
        raise is_up(home)
    end_left(home, _say)
    arguments = [each for each in sys.argv[sys.argv.index("up") + 1 :] if each not in ("--detach", "-d", "--json")]
    process = start_detached(home, arguments)
    try:
        state = wait_ready(home, process, wait_s, lambda _: None, "on a busy machine give more seconds as --wait")
    except BaseException:
        process.terminate()
        process.wait()
        raise
    _print_state(home, state, as_json=as_json)
    return 0


def down(
    home: HomeFolder = _DEFAULT_HOME,
    wait: Annotated[
        float | None,
        typer.Option(
            min=1,
            callback=_seconds,
            help="Seconds for everything to end (default: what the processes were given).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """End the services and the agent of a home; running jobs commit first and go on at the next `phalanx up`. Exit 1
    where ranks had to be killed before they had committed.
    """
    from phalanx.home.detached import end
    from phalanx.home.folder import home_of, using

    place = home_of(home)
    with using(place):
        ended = end(place, wait, _say)
    if as_json:
        print_json({"home": str(place.folder), "was_up": ended.was_up, "lost": list(ended.lost)})
    elif not ended.was_up:
        raise PhalanxError(
            "--home",
            value=str(place.folder),
            expected="a folder whose services are up",
            remedy="name the one with which they were started",
        )
    return _told_lost(ended.lost)


def status(home: HomeFolder = _DEFAULT_HOME, as_json: AsJson = False) -> int:
    """Show the processes of a home; exit 1 unless all of them are up."""
    from phalanx.home.folder import home_of, using
    from phalanx.home.places import living
    from phalanx.home.state import read_state

    place = home_of(home)
    with using(place):
        state = read_state(place)
        left = living(place) if state is None else ()
    if state is None:
        if as_json:
            rows = [asdict(each) for each in left]
            print_json({"home": str(place.folder), "up": False, "processes": [], "left_behind": rows})
        elif left:
            print_table(
                ("process", "state", "pid"), [(each.name, "ending", str(each.pid)) for each in left], "services"
            )
            _say(
                f"the supervisor of {place.folder} was killed; these end by themselves, the agent once its ranks have"
                " committed; `phalanx down` waits for them, `phalanx up` waits and starts all again"
            )
        else:
            sys.stderr.write(f"phalanx: nothing is up in {place.folder}; `phalanx up` starts the services\n")
        return _NOT_UP
    _print_state(place, state, as_json=as_json)
    return 0 if state.ready else _NOT_UP


def _print_state(home: Home, state: HomeState, *, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "home": str(home.folder),
        "up": state.ready,
        "page_url": state.page_url,
        "context": str(home.client),
        **asdict(state),
    }
    if as_json:
        print_json(facts)
        return
    rows = [
        (each.name, "up" if each.ready else "not up", str(each.pid or "-"), each.restarts, each.last_exit)
        for each in state.processes
    ]
    print_table(("process", "state", "pid", "restarts", "last exit"), rows, "services")
    print_facts({"page": state.page_url, "context": str(home.client)}, "where")
