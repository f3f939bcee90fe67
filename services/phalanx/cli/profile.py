"""`phalanx job profile`: what chosen ranks do over a few steps, measured on request and kept beside the run."""

from __future__ import annotations

import sys
import uuid
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
    place = place_of(job, overrides or (), context)
    profiles = Profiles(place.store)
    if out is not None:
        _download(profiles, out, as_json=as_json)
    elif show:
        _list(profiles, as_json=as_json)
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
