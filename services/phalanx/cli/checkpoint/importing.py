"""`phalanx checkpoint import`: a job that begins with what others trained."""

from __future__ import annotations

import dataclasses
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.checkpoint.progress import bytes_done
from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.output import print_facts, print_json, print_table
from phalanx.cli.places import given
from phalanx.core.numbering import LARGEST

if TYPE_CHECKING:
    from phalanx.checkpoint.importing.run import Import
    from phalanx.spec import Job

_SHOWN = 6


class RotaryPairs(StrEnum):
    """How the elements of a head are paired for rotary positions."""

    HALF = "half"
    INTERLEAVED = "interleaved"


def register(group: typer.Typer) -> None:
    """Adds the command to the `checkpoint` group."""
    group.command("import")(import_checkpoint)


def import_checkpoint(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            parser=given,
            help="Folder (path, file:// or s3://) with Hugging Face safetensors, or of torch.distributed.checkpoint.",
        ),
    ],
    job: Annotated[
        str,
        typer.Option(
            "--job",
            metavar="JOB",
            help="File of the job that begins with it, or URL of the job's root.",
            parser=given,
        ),
    ],
    rotary: Annotated[
        RotaryPairs | None,
        typer.Option(help="How the source pairs a head's elements: interleaved (torchtitan, Meta) or half."),
    ] = None,
    step: Annotated[
        int,
        typer.Option(
            min=0, max=LARGEST, help="Step at which the job begins: where its learning rate's schedule stands."
        ),
    ] = 0,
    without_optimizer: Annotated[
        bool, typer.Option("--without-optimizer", help="Import weights alone; AdamW begins anew.")
    ] = False,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", metavar="NAME", help="A name of the source that the model can do without."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would become what; write nothing.")] = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Make the first checkpoint of a job from a Hugging Face or torch checkpoint; `phalanx run JOB` goes on from it.
    After a kill the same command goes on with what is there.
    """
    from phalanx.checkpoint.importing.run import Import, Options

    chosen = Options(None if rotary is None else rotary.value, not without_optimizer, tuple(leave_out or ()), step)
    planned = Import(_job(job, overrides or ()), source, chosen)
    if dry_run:
        _show(planned, as_json)
        return
    with bytes_done("importing", planned.num_bytes, quiet=as_json) as advance:
        report = planned.run(advance)
    facts = dataclasses.asdict(report)
    if as_json:
        print_json(facts)
        return
    print_facts({**facts, "left_out": _some(report.left_out)}, "imported")
    if planned.source_step not in (None, report.step):
        sys.stderr.write(
            f"phalanx: the source had done {planned.source_step} steps, this job begins at step {report.step}: "
            "if its schedule is to go on there, import with --step into a job of another name\n"
        )


def _job(job: str, overrides: list[str] | tuple[str, ...]) -> Job:
    """The job of a file, or the one that is stored at the URL of its root."""
    from phalanx.core.errors import PhalanxError
    from phalanx.lineage import Lineage
    from phalanx.objects import open_store
    from phalanx.spec import load_job, parse_job

    if "://" not in job:
        return load_job(job, overrides)
    record = Lineage(open_store(job.rstrip("/"))).read_job()
    if record is None:
        raise PhalanxError(
            "--job", value=job, expected="the root of a job whose import was begun", remedy="name its job file"
        )
    return parse_job(record.spec, where=job)


def _show(planned: Import, as_json: bool) -> None:
    from phalanx.checkpoint.importing.run import names_shown

    rows = names_shown(planned.plan)
    left_out = planned.plan.left_out
    facts: dict[str, Any] = {
        "source": planned.source.url,
        "source_kind": planned.source.kind,
        "num_bytes": planned.num_bytes,
        "num_updates": planned.num_updates,
        "rotary": planned.plan.rotary,
        "source_step": planned.source_step,
    }
    if as_json:
        print_json({**facts, "tensors": dict(rows), "left_out": left_out})
        return
    print_table(("tensor", "from"), rows, "would be imported")
    print_facts({**facts, "left_out": left_out or "nothing"}, "nothing was written")


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "nothing"
