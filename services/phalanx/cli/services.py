"""`phalanx up | down | status`: the services and an agent on this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.output import print_facts, print_json, print_table
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.home.layout import Home
    from phalanx.home.make import HomeSettings
    from phalanx.home.state import HomeState

HomeFolder = Annotated[
    Path, typer.Option("--home", metavar="DIR", help="Folder of certificates, tokens, configurations, databases, logs.")
]
_DEFAULT_HOME = Path("phalanx-home")
_NOT_UP = 1


def register(app: typer.Typer) -> None:
    """Adds the three commands."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(
    home: HomeFolder = _DEFAULT_HOME,
    storage: Annotated[
        str, typer.Option(metavar="URL", help="Root of the cluster's registry (default: a folder in the home).")
    ] = "",
    storage_endpoint: Annotated[str, typer.Option(metavar="URL", help="S3 server other than AWS.")] = "",
    storage_region: Annotated[str, typer.Option(help="Region of the bucket.")] = "",
    host: Annotated[str, typer.Option(help="Address that the services listen on.")] = "127.0.0.1",
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Another host name or address of this machine, for certificates.")
    ] = None,
    port_base: Annotated[
        int, typer.Option(help="Port of the monitor's page; the services' follow. 0 takes free ones and keeps them.")
    ] = 7700,
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks that may run here (default: GPUs, or CPUs).")] = None,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Services only; no ranks run on this machine.")] = False,
    dcgm: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="dcgm-exporters to read GPUs from.")] = "",
    agent_grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks get to commit when the services are ended.")
    ] = 120.0,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once everything is up.")] = False,
    wait: Annotated[float, typer.Option(min=1, help="Seconds for everything to be up, with --detach.")] = 60.0,
    init_only: Annotated[bool, typer.Option("--init-only", help="Make the home folder and start nothing.")] = False,
    as_json: AsJson = False,
) -> int:
    """Start the services (data, train, checkpoint, monitor) and an agent here, and keep them alive."""
    from phalanx.client import absolute_url
    from phalanx.home.make import HomeSettings, with_slots
    from phalanx.objects import StorageSettings

    settings = HomeSettings(
        storage=absolute_url(storage),
        storage_settings=StorageSettings(endpoint=storage_endpoint or None, region=storage_region or None),
        host=host,
        hosts=tuple(name or ()),
        port_base=port_base,
        options={"monitor": {"dcgm": dcgm}} if dcgm else {},
    )
    settings = with_slots(settings, slots)
    if detach:
        return _up_detached(home, wait, as_json=as_json)
    if init_only:
        made = _made(home, settings)
        facts = {"home": str(made.folder), "context": str(made.client)}
        print_json(facts) if as_json else print_facts(facts, "home")
        return 0
    return _up(home, settings, with_agent=not no_agent, agent_grace_s=agent_grace, as_json=as_json)


def _made(home: Path, settings: HomeSettings) -> Home:
    from phalanx.home.layout import Home
    from phalanx.home.make import make_home
    from phalanx.home.state import held

    with held(Home(home.absolute())):
        return make_home(home, settings)[0]


def _up(home: Path, settings: HomeSettings, *, with_agent: bool, agent_grace_s: float, as_json: bool) -> int:
    """In the foreground, until SIGINT or SIGTERM."""
    from phalanx.gang import StopSignals
    from phalanx.home.layout import AGENT, SERVICES, Home
    from phalanx.home.make import make_home
    from phalanx.home.state import held
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

    with StopSignals() as stop, held(Home(home.absolute())):
        made, addresses = make_home(home, settings)
        names = (*SERVICES, AGENT) if with_agent else SERVICES
        Supervisor(made, addresses, commands_of(made, names), agent_grace_s).run(stop, on_change)
    return 0


def _tell(state: HomeState) -> None:
    words = [
        f"{each.name} {'up' if each.ready else 'starting' if each.pid else each.last_exit or 'ended'}"
        + (f" ({each.restarts} restarts)" if each.restarts else "")
        for each in state.processes
    ]
    sys.stderr.write(", ".join(words) + "\n")


def _up_detached(home: Path, wait_s: float, *, as_json: bool) -> int:
    """The same command without `--detach`, in a session of its own."""
    from phalanx.home.detached import start_detached, wait_ready
    from phalanx.home.layout import Home
    from phalanx.home.state import is_held, is_up

    place = Home(home.absolute())
    if is_held(place):
        raise is_up(place)
    arguments = [each for each in sys.argv[sys.argv.index("up") + 1 :] if each not in ("--detach", "-d", "--json")]
    process = start_detached(place, arguments)
    try:
        state = wait_ready(place, process, wait_s, lambda _: None)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    _print_state(place, state, as_json=as_json)
    return 0


def down(
    home: HomeFolder = _DEFAULT_HOME,
    wait: Annotated[float, typer.Option(min=1, help="Seconds for everything to end.")] = 180.0,
    as_json: AsJson = False,
) -> int:
    """End the services and the agent of a home; running jobs commit first and go on at the next `phalanx up`."""
    from phalanx.home.detached import end
    from phalanx.home.layout import Home

    place = Home(home.absolute())
    was_up = end(place, wait)
    if as_json:
        print_json({"home": str(place.folder), "was_up": was_up})
    elif not was_up:
        raise PhalanxError(
            "--home",
            value=str(place.folder),
            expected="a folder whose services are up",
            remedy="name the one with which they were started",
        )
    return 0


def status(home: HomeFolder = _DEFAULT_HOME, as_json: AsJson = False) -> int:
    """Show the processes of a home; exit 1 unless all of them are up."""
    from phalanx.home.layout import Home
    from phalanx.home.state import read_state

    place = Home(home.absolute())
    state = read_state(place)
    if state is None:
        if as_json:
            print_json({"home": str(place.folder), "up": False, "processes": []})
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
