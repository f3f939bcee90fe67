"""`phalanx job profile`: what chosen ranks do over a few steps, measured on request and kept beside the run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context, RequestId, open_client
from phalanx.cli.output import print_json, print_table
from phalanx.cli.places import given, given_path
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.checkpoint.place import JobPlace
    from phalanx.lineage.profiles import Found, Profiles


def register(group: typer.Typer) -> None:
    """Adds the command to the `job` group."""
    group.command("profile")(profile)


def profile(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="Job file, URL of a job's root, or name of a submitted job.", parser=given),
    ],
    steps: Annotated[int, typer.Option("--steps", help="How many steps to measure.")] = 3,
    ranks: Annotated[str, typer.Option("--ranks", metavar="R,R", help="Which ranks (default: all).")] = "",
    show: Annotated[bool, typer.Option("--list", help="List the profiles of the job and ask for none.")] = False,
    summary: Annotated[
        int | None,
        typer.Option(
            "--summary",
            metavar="N",
            help="Of each rank of profile N: time of computing and of communication, and how much of one lay beside "
            "the other.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Download what is stored into this folder.", parser=given_path),
    ] = None,
    request_id: RequestId = None,
    context: Context = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Have ranks of a running job measured over its next steps: a Chrome trace and what memory is used for, stored
    beside its checkpoints. Requests are carried out one after another.
    """
    from phalanx.cli.named import place_of
    from phalanx.lineage.profiles import Profiles

    wanted = _ranks_of(ranks)
    _require_one(**{"--list": show, "--summary": summary is not None, "--out": out is not None})
    place = place_of(job, overrides or (), context)
    profiles = Profiles(place.store)
    if out is not None:
        _download(profiles, out, as_json=as_json)
    elif show:
        _list(profiles, as_json=as_json)
    elif summary is not None:
        _summarise(profiles, summary, as_json=as_json)
    else:
        _require_running(job, place, wanted, context)
        request = profiles.ask(steps, wanted, request_id or uuid.uuid4().hex)
        if as_json:
            print_json({"profile": request.number, "steps": request.steps, "ranks": list(request.ranks)})
        else:
            who = f"ranks {', '.join(map(str, request.ranks))}" if request.ranks else "all ranks"
            sys.stdout.write(f"profile {request.number}: {request.steps} steps of {who}; --list tells what is stored\n")


def _ranks_of(text: str) -> tuple[int, ...]:
    ranks = [part.strip() for part in text.split(",") if part.strip()]
    for each in ranks:
        if not (each.isascii() and each.isdigit() and len(each) <= 8):
            raise PhalanxError("--ranks", value=each, expected="ranks like 0,5", remedy="correct it")
    return tuple(sorted({int(each) for each in ranks}))


def _require_one(**given: bool) -> None:
    chosen = [option for option, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise PhalanxError(
            chosen[1], expected=f"one of {', '.join(given)}", remedy=f"leave it or {chosen[0]} out, and ask twice"
        )


def _require_running(job: str, place: JobPlace, ranks: tuple[int, ...], context: Path | None) -> None:
    """Raises PhalanxError for a submitted job that is over, and for a rank that the newest attempt does not have."""
    from phalanx.cli.named import is_submitted

    if is_submitted(job):
        with open_client(context) as client:
            found = client.job(job)
        if found.is_over:
            raise PhalanxError(
                "JOB", value=f"{job}, which has {found.state}", expected="a job that runs", remedy="resume it first"
            )
    newest = place.lineage.newest_attempt()
    world_size = newest.placement.get("world_size") if newest is not None else None
    if isinstance(world_size, int) and ranks and ranks[-1] >= world_size:
        raise PhalanxError(
            "--ranks", value=ranks[-1], expected=f"ranks from 0 to {world_size - 1}", remedy="name ranks of the job"
        )


def _list(profiles: Profiles, *, as_json: bool) -> None:
    found = profiles.all()
    if as_json:
        print_json({"profiles": [_facts(each) for each in found]})
        return
    rows = [
        (
            str(each.request.number),
            str(each.request.steps),
            ", ".join(map(str, each.request.ranks)) or "all",
            "waits" if each.taken is None else f"attempt {each.taken.attempt}",
            ", ".join(map(str, each.ranks_done)) or "none",
        )
        for each in found
    ]
    print_table(("profile", "steps", "ranks", "taken by", "stored of ranks"), rows, "profiles")


def _facts(found: Found) -> dict[str, Any]:
    return {
        "profile": found.request.number,
        "steps": found.request.steps,
        "ranks": list(found.request.ranks),
        "attempt": None if found.taken is None else found.taken.attempt,
        "ranks_done": list(found.ranks_done),
        "stored": [{"key": key, "num_bytes": size} for key, size in found.stored.items()],
    }


def _summarise(profiles: Profiles, number: int, *, as_json: bool) -> None:
    """Reads each trace of the profile, one after another, and tells of its rank."""
    found = next((each for each in profiles.all() if each.request.number == number), None)
    if found is None:
        raise PhalanxError(
            "--summary", value=number, expected="the number of a profile of the job", remedy="see --list for them"
        )
    ranks = [_timed(profiles, key, rank) for rank, key in found.traces.items()]
    if as_json:
        print_json({"profile": number, "ranks": ranks})
        return
    rows = [(each["rank"], each["steps"], *_figures(each)) for each in ranks]
    columns = ("rank", "steps", "wall, s", "computing, s", "communication, s", "of it beside computing")
    print_table(columns, rows, f"profile {number}" if rows else f"profile {number}: no trace is stored yet")


def _figures(rank: Mapping[str, Any]) -> tuple[str, ...]:
    share = rank["communication_beside_computing"]
    times = (rank["wall_s"], rank["computing_s"], rank["communication_s"])
    return *(f"{each:.3f}" for each in times), "-" if share is None else f"{share:.0%}"


def _timed(profiles: Profiles, key: str, rank: int) -> dict[str, Any]:
    """What a stored trace says, in seconds over all of its steps. Raises PhalanxError for one that is none."""
    from phalanx.telemetry.trace import timeline, total

    try:
        read = timeline(profiles.read(key))
    except (ValueError, KeyError, TypeError) as error:
        raise PhalanxError(
            key, expected="a Chrome trace of torch's profiler", remedy=f"measure anew: it can't be read ({error})"
        ) from error
    wall_us, computing_us, communicating_us = map(total, (read.steps, read.computing, read.communicating))
    return {
        "rank": rank,
        "steps": read.num_steps,
        "wall_s": wall_us / 1e6,
        "computing_s": computing_us / 1e6,
        "communication_s": communicating_us / 1e6,
        "communication_beside_computing": read.share_beside if communicating_us else None,
    }


def _download(profiles: Profiles, out: Path, *, as_json: bool) -> None:
    """Each stored file as `<profile>-r<rank>-<kind>.json`; one that is there already is written anew."""
    written = []
    for found in profiles.all():
        for key in found.stored:
            path = out / key.removeprefix("profiles/").replace("/", "-")
            try:
                out.mkdir(parents=True, exist_ok=True)
                path.write_bytes(profiles.read(key))
            except OSError as error:
                expected = "a folder that can be written"
                raise PhalanxError("--out", value=str(out), expected=expected, remedy=f"{error.strerror}") from error
            written.append(str(path))
    if as_json:
        print_json({"files": written})
    else:
        sys.stdout.write("".join(f"{path}\n" for path in written) or "nothing is stored yet\n")
