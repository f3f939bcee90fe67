"""`phalanx data verify`: every byte of a dataset, or what a run has read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context
from phalanx.cli.data.arguments import lasting, refuse, refuse_folder
from phalanx.cli.errors import INTERRUPTED
from phalanx.cli.output import print_json
from phalanx.cli.places import given, given_path
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.data.catalog import FoundSplit
    from phalanx.data.checked import CheckedShards
    from phalanx.data.verification import Damage, ShardCheck
    from phalanx.spec import Job


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("verify")(verify)


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|JOB",
            parser=given,
            help="Dataset or split folder (a URL), a job file (.toml), or name of a submitted job.",
            show_default=False,
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            parser=given_path,
            metavar="FILE",
            help="Of a dataset: write down in FILE which shards are whole, and go on from what it says; removed once "
            "all are.",
            show_default=False,
        ),
    ] = None,
    context: Context = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset against its digests; or, for a job, prove from the step records that its run
    read each window exactly once. Exit 1 where something is damaged or does not hold.
    """
    from phalanx.cli.named import job_of

    refuse_folder(target, "the URL of a dataset, a job file or the name of a submitted job")
    if "://" in target:
        settings = {
            "--set": overrides[0] if overrides else None,
            "--context": None if context is None else str(context),
        }
        refuse(settings, "the URL of a dataset")
        _verify_dataset(lasting(target), state, as_json)
    elif state is not None:
        raise PhalanxError("--state", value=str(state), expected="the URL of a dataset with it", remedy="leave it out")
    else:
        _verify_job(job_of(target, overrides or (), context), as_json)


def _verify_job(job: Job, as_json: bool) -> None:
    from phalanx.data.job_proof import prove_job

    proof = prove_job(job)
    if as_json:
        print_json({**asdict(proof), "ok": proof.ok})
    else:
        for mismatch in proof.mismatches:
            typer.echo(mismatch)
        typer.echo(
            f"{proof.windows:,} windows of {proof.steps:,} steps on the live lineage: {proof.samples_missing} missing, "
            f"{proof.samples_repeated} repeated, {proof.num_mismatches} wrong; {proof.bytes_compared:,} bytes compared "
            f"with a reading by webdataset; {proof.steps_redone} recorded steps were redone"
        )
        if proof.windows_left_out or proof.windows_not_compared:
            typer.echo(
                f"{proof.windows_left_out:,} windows carry no loss by the journal; {proof.windows_not_compared:,} "
                "were read from shards that were damaged since, and can no longer be compared"
            )
        if len(proof.epochs) > 1:
            passes = ", ".join(f"{name} {epochs:.2f}" for name, epochs in proof.epochs.items())
            typer.echo(f"passes over each source: {passes}")
        if not proof.steps:
            typer.echo("no checkpoint is committed yet: there is nothing to prove")
    if not proof.ok:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Found:
    """What a check of a dataset has found so far."""

    damages: list[tuple[str, Damage]]
    shards: int = 0
    num_bytes: int = 0
    earlier: int = 0

    def take(self, path: str, check: ShardCheck) -> None:
        self.shards, self.num_bytes = self.shards + 1, self.num_bytes + check.num_bytes
        self.earlier += check.is_earlier
        self.damages += [(path, damage) for damage in check.damages]


def _verify_dataset(url: str, state: Path | None, as_json: bool) -> None:
    from phalanx.data.catalog import whole_and_lost_at
    from phalanx.data.checked import CheckedShards
    from phalanx.data.verification import lost_manifests, verify_tokenizers
    from phalanx.objects import open_store

    root = open_store(url)
    splits, lost = whole_and_lost_at(root)
    with nullcontext() if state is None else CheckedShards(state, root.url) as checked:
        found = _Found([*lost_manifests(lost), *verify_tokenizers(root, splits)])
        is_done = False
        try:
            _check(splits, checked, found)
            is_done = True
        except KeyboardInterrupt:
            _end_at_once(found, checked, as_json)
        finally:
            # What was found is told, too, where storage fails.
            if not as_json:
                _tell(found, checked, is_done)
        if as_json:
            rows = [{"path": path, **asdict(damage)} for path, damage in found.damages]
            facts = {"shards": found.shards, "shards_checked_earlier": found.earlier, "bytes": found.num_bytes}
            print_json({"url": url, **facts, "ok": not rows, "damages": rows})
        if found.damages:
            raise typer.Exit(1)
        if checked is not None:
            checked.remove()


def _check(splits: Sequence[FoundSplit], checked: CheckedShards | None, found: _Found) -> None:
    from rich.console import Console

    from phalanx.cli.counting import counting_bytes
    from phalanx.data.verification import verify_split

    with counting_bytes(Console(stderr=True), "verify", sum(each.split.num_bytes for each in splits)) as told:
        for each in splits:
            of_split = None if checked is None else checked.of(each.path, each.split.digest)
            for check in verify_split(each.store, each.split, told, checked=of_split):
                found.take(each.path, check)


def _tell(found: _Found, checked: CheckedShards | None, is_done: bool) -> None:
    for path, damage in found.damages:
        typer.echo(f"{path}/{damage}".lstrip("/"))
    earlier = ""
    if checked is not None and found.earlier:
        earlier = f" ({found.earlier} of them before and not written since; this check was begun at {checked.since})"
    typer.echo(
        f"{found.shards} shards checked{earlier}, {found.num_bytes:,} bytes, {len(found.damages)} damages"
        f"{'' if is_done else ' so far'}"
    )


def _end_at_once(found: _Found, checked: CheckedShards | None, as_json: bool) -> NoReturn:
    """Tells what was found and ends the process: its threads may wait for a store that does not answer."""
    if not as_json:
        _tell(found, checked, is_done=False)
    kept = "nothing is kept: with --state FILE a check goes on where the one before it ended"
    if checked is not None:
        kept = f"the same command goes on where it ended (--state {checked.path})"
    sys.stdout.flush()
    sys.stderr.write(f"phalanx: interrupted; {kept}\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
