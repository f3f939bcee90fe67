"""`phalanx job ...`: submit a job to the services, watch it, stop it, resume it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli import profile, stack
from phalanx.cli.config import AsJson, Overrides, Partial, with_partial
from phalanx.cli.context import Context, RequestId, open_client
from phalanx.cli.options import Option, named_as_given
from phalanx.cli.output import print_facts, print_json, print_table
from phalanx.cli.places import given, given_id, given_path
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.train.values import JobView

_group = typer.Typer(no_args_is_help=True, help="Submit, watch, stop and resume jobs of the services.")

Name = Annotated[
    str, typer.Argument(metavar="JOB", help="NAME, PROJECT/NAME or projects/PROJECT/jobs/NAME.", parser=given)
]
Revision = Annotated[
    int, typer.Option("--revision", min=0, help="Only if this is still the job's revision (0: do not check).")
]


def register(app: typer.Typer) -> None:
    """Adds the `job` group and `nodes` to the command line."""
    profile.register(_group)
    stack.register(_group)
    app.add_typer(_group, name="job")
    app.command("nodes")(nodes)


@_group.command("submit")
def submit(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="The job file.", show_default=False, parser=given_path)
    ] = None,
    overrides: Overrides = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="JOB@STEP",
            parser=given,
            help="Start from a checkpoint of another job (`JOB` for its latest).",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            parser=given_id,
            metavar="NAME",
            help="Name of a forked job (default: the other's with a number).",
            show_default=False,
        ),
    ] = None,
    partial: Partial = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check the file and submit nothing; data and model are looked at once it is prepared."
        ),
    ] = False,
    watch_: Annotated[bool, typer.Option("--watch", help="Go on watching it until it is over.")] = False,
    request_id: RequestId = None,
    context: Context = None,
    as_json: AsJson = False,
) -> int:
    """Submit a job file, or fork a job with other keys."""
    if (job is None) == (from_ is None):
        raise PhalanxError(
            "phalanx job submit",
            expected="a job file, or --from JOB@STEP",
            remedy="name one of the two (`--from` takes the other job's file, changed by --set)",
        )
    _require_effect(is_fork=job is None, name=name, partial=partial, watches=watch_, dry_run=dry_run)
    overrides = with_partial(overrides, partial)
    source, at = _source_of(from_ or "")
    with open_client(context) as client:
        if job is not None:
            submitted = client.submit(job, overrides, request_id=request_id or "", dry_run=dry_run)
        else:
            submitted = client.fork(
                source, at, overrides, name=name or "", request_id=request_id or "", dry_run=dry_run
            )
        for warning in submitted.warnings:
            sys.stderr.write(f"warning: {warning}\n")
        if watch_ and not dry_run:
            return _watch(context, submitted.job.name, as_json=as_json)
        if as_json:
            print_json({**facts_of(submitted.job), "warnings": list(submitted.warnings), "dry_run": dry_run})
        else:
            said = "may be submitted" if dry_run else str(submitted.job.state)
            sys.stdout.write(f"{submitted.job.name}: {said}\n")
    return 0


def _require_effect(
    *, is_fork: bool, name: str | None, partial: Sequence[str] | None, watches: bool, dry_run: bool
) -> None:
    """Raises PhalanxError for an option that would do nothing beside the others."""
    if not is_fork and name is not None:
        raise PhalanxError(
            "--name",
            value=name,
            expected="--from JOB@STEP beside it, as a job file says its own name",
            remedy=f"write --set 'job.name=\"{name}\"' in its place",
        )
    if not is_fork and partial:
        raise PhalanxError(
            "--partial",
            value=partial[0],
            expected="--from JOB@STEP beside it, as a new job restores nothing",
            remedy="leave it out, or write it as [checkpoint] partial into the job file",
        )
    if watches and dry_run:
        raise PhalanxError(
            "--watch", expected="no --dry-run beside it, which submits nothing to watch", remedy="give one of the two"
        )


def _source_of(text: str) -> tuple[str, str]:
    """The job and its checkpoint that `--from` names: `JOB@STEP`, or `JOB` for its latest."""
    source, at_sign, at = text.partition("@")
    if at_sign and not at.strip():
        raise PhalanxError(
            "--from", value=text, expected="a checkpoint behind the @", remedy="write JOB@STEP, or JOB for its latest"
        )
    return source, at or "latest"


@_group.command("ls")
def list_jobs(
    mine: Annotated[bool, typer.Option("--mine", help="Only those that you submitted.")] = False,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only those in this state; may be repeated.")
    ] = None,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with open_client(context) as client:
        jobs = list(client.jobs(mine=mine, states=_states(state or ())))
    if as_json:
        print_json({"jobs": [facts_of(job) for job in jobs]})
        return
    rows = [
        (
            short_name(job.name),
            str(job.state),
            f"{job.step:,} of {job.num_steps:,}",
            job.attempt,
            job.owner,
            job.message,
        )
        for job in jobs
    ]
    print_table(("job", "state", "step", "attempt", "owner", ""), rows, "jobs")


@_group.command("show")
def show(job: Name, context: Context = None, as_json: AsJson = False) -> None:
    """Show a job as it stands."""
    with open_client(context) as client:
        found = client.job(job)
    _print_job(found, as_json=as_json)


@_group.command("watch")
def watch(
    job: Name,
    after: Annotated[int, typer.Option(min=0, help="Only events behind this revision.")] = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> int:
    """Follow a job until it is over; with --json one object a line. Exit 0 only if it succeeded, 2 where you must
    change something (its cause is a user's mistake), else 1.
    """
    from phalanx.client import job_name

    return _watch(context, job_name(job), after=after, as_json=as_json)


@_group.command("logs")
def logs(
    job: Name,
    rank: Annotated[int, typer.Option(min=0, help="The rank.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until the job is over.")
    ] = False,
    attempt: Annotated[int, typer.Option(min=0, help="The attempt (0: the newest).")] = 0,
    tail: Annotated[int, typer.Option(min=0, metavar="BYTES", help="Only the last bytes (0: all).")] = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Print what a rank printed; with --json one object a piece, each on a line."""
    is_silent = True
    options = {
        "rank": Option("--rank", rank),
        "attempt": Option("--attempt", attempt),
        "offset": Option("--tail", tail),
    }
    with open_client(context) as client, named_as_given(options):
        for piece in client.logs(job, rank, attempt=attempt, offset=-tail, follow=follow):
            is_silent = is_silent and not piece.data
            if as_json:
                text = piece.data.decode(errors="replace")
                facts = {"attempt": piece.attempt, "next_offset": piece.next_offset, "text": text}
                sys.stdout.write(json.dumps(facts) + "\n")
                sys.stdout.flush()
            else:
                sys.stdout.buffer.write(piece.data)
                sys.stdout.buffer.flush()
    if is_silent and not as_json:
        sys.stderr.write(f"rank {rank} has printed nothing\n")


@_group.command("wait")
def wait(
    job: Name,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds after which to give up (exit 1).")] = None,
    context: Context = None,
    as_json: AsJson = False,
) -> int:
    """Wait until a job is over. Exit 0 only if it succeeded, 2 where you must change something (its cause is a user's
    mistake), else 1.
    """
    with open_client(context) as client:
        found = client.wait(job, timeout)
    if as_json:
        print_json(facts_of(found))
    return exit_code(found)


@_group.command("stop")
def stop(
    job: Name,
    request_id: RequestId = None,
    revision: Revision = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Have a job commit a checkpoint and end."""
    with open_client(context) as client, _revision_named(revision):
        _print_job(
            client.stop(job, request_id=request_id or "", expected_revision=revision), as_json=as_json, short=True
        )


@_group.command("suspend")
def suspend(
    job: Name,
    request_id: RequestId = None,
    revision: Revision = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Have a job commit a checkpoint and leave its nodes, to be resumed."""
    with open_client(context) as client, _revision_named(revision):
        _print_job(
            client.suspend(job, request_id=request_id or "", expected_revision=revision), as_json=as_json, short=True
        )


@_group.command("resume")
def resume(
    job: Name,
    overrides: Overrides = None,
    code: Annotated[
        Path | None,
        typer.Option(
            "--code", metavar="FOLDER", parser=given_path, help="Run the code of this folder from here on, packed anew."
        ),
    ] = None,
    request_id: RequestId = None,
    revision: Revision = 0,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a suspended, stopped or failed job, in another layout where --set says so."""
    with open_client(context) as client, _revision_named(revision):
        found = client.resume(job, overrides or (), code=code, request_id=request_id or "", expected_revision=revision)
    _print_job(found, as_json=as_json, short=True)


@_group.command("checkpoint")
def checkpoint_now(job: Name, request_id: RequestId = None, context: Context = None, as_json: AsJson = False) -> None:
    """Have a checkpoint taken at the next step boundary."""
    with open_client(context) as client:
        _print_job(client.checkpoint_now(job, request_id=request_id or ""), as_json=as_json, short=True)


def nodes(context: Context = None, as_json: AsJson = False) -> None:
    """List the nodes of the cluster with what they have."""
    with open_client(context) as client:
        found = client.nodes()
    rows: list[dict[str, Any]] = [
        {
            "node": view.node.node_id,
            "host": view.node.inventory.host,
            "connected": view.node.is_connected,
            "free_slots": view.num_free_slots,
            "slots": view.node.inventory.num_slots,
            "cpus": view.node.inventory.num_cpus,
            "gpus": [gpu.name for gpu in view.node.inventory.gpus],
        }
        for view in found
    ]
    if as_json:
        print_json({"nodes": rows})
    else:
        table = [(*list(row.values())[:-1], ", ".join(row["gpus"]) or "none") for row in rows]
        print_table(("node", "host", "connected", "free slots", "slots", "CPUs", "GPUs"), table, "nodes")


def _revision_named(revision: int) -> AbstractContextManager[None]:
    return named_as_given({"expected revision": Option("--revision", revision)})


def facts_of(job: JobView) -> dict[str, Any]:
    """What `--json` prints of a job."""
    return {
        "name": job.name,
        "state": str(job.state),
        "intent": str(job.intent),
        "revision": job.revision,
        "step": job.step,
        "num_steps": job.num_steps,
        "loss": job.loss,
        "epochs": dict(sorted(job.epochs.items())),
        "replica_bytes_per_token": job.replica_bytes_per_token,
        "step_parts": None if job.step_parts is None else asdict(job.step_parts),
        "expert_load": None if job.expert_load is None else asdict(job.expert_load),
        "evaluation": None if job.evaluation is None else asdict(job.evaluation),
        "attempt": job.attempt,
        "attempts_without_progress": job.num_attempts_without_progress,
        "checkpoint": None
        if job.checkpoint is None
        else {"attempt": job.checkpoint.attempt, "step": job.checkpoint.step},
        "owner": job.owner,
        "created": job.created,
        "message": job.message,
        "cause": None if job.cause is None else {"kind": job.cause.kind, "message": job.cause.message},
        "placement": {each.node_id: list(each.ranks) for each in job.placement},
    }


def exit_code(job: JobView) -> int:
    """0 if it succeeded; else 1, or 2 where its user must change something, and a line on stderr that says why."""
    if str(job.state) == "succeeded":
        return 0
    why = "" if job.cause is None else f": {job.cause.message}"
    sys.stderr.write(f"phalanx: {job.name} {job.state}{why}\n")
    return 2 if job.cause is not None and str(job.cause.kind) == "user_error" else 1


def short_name(name: str) -> str:
    """`NAME` in the default project, else `PROJECT/NAME`."""
    _, project, _, uid = name.split("/")
    return uid if project == "default" else f"{project}/{uid}"


def _states(words: Sequence[str]) -> tuple[Any, ...]:
    from phalanx.lineage.events import JobState

    known = [str(state) for state in JobState]
    for word in words:
        if word.lower() not in known:
            raise PhalanxError("--state", value=word, expected=f"one of {', '.join(known)}", remedy="correct it")
    return tuple(JobState(word.lower()) for word in words)


def _watch(context: Path | None, name: str, *, after: int = 0, as_json: bool = False) -> int:
    from phalanx.cli.job_display import watch_job

    with open_client(context) as client:
        return exit_code(watch_job(client, name, after, as_json=as_json))


def _print_job(job: JobView, *, as_json: bool, short: bool = False) -> None:
    facts = facts_of(job)
    if as_json:
        print_json(facts)
    elif short:
        sys.stdout.write(f"{job.name}: {job.state}{' (' + job.message + ')' if job.message else ''}\n")
    else:
        from phalanx.cli.job_display import evaluation_words, load_words, shares_of

        if job.checkpoint is not None:
            facts["checkpoint"] = f"a{job.checkpoint.attempt}-s{job.checkpoint.step}"
        facts["cause"] = None if job.cause is None else job.cause.message
        if job.step_parts is not None and job.step_parts.wall_s > 0:
            facts["step_parts"] = shares_of(job.step_parts)
        if job.expert_load is not None:
            facts["expert_load"] = load_words(job.expert_load)
        if job.evaluation is not None:
            facts["evaluation"] = evaluation_words(job.evaluation)
        facts["epochs"] = ", ".join(f"{source} {passes:.2f}" for source, passes in facts["epochs"].items())
        print_facts({key: value for key, value in facts.items() if value not in (None, "", {})}, short_name(job.name))
