"""`phalanx data prepare | ls | show | verify | trace | register`: text to shards, what came out, the catalog."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson, Overrides
from phalanx.cli.context import Context, open_client
from phalanx.cli.output import print_json, print_table
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.data.prepare import PrepareReport
    from phalanx.data.tracing import Tracer
    from phalanx.spec import Job

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Dataset or split folder: file:// or s3://.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Adds the `data` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Prepare text, and look at datasets.")
    group.command("prepare")(prepare)
    group.command("ls")(ls)
    group.command("show")(show)
    group.command("verify")(verify)
    group.command("trace")(trace)
    group.command("register")(register_dataset)
    app.add_typer(group, name="data")


def prepare(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Folder or file of text (.txt, .md, .jsonl, source files).")
    ],
    out: Annotated[str, typer.Option("--out", metavar="URL", help="Where the dataset goes: file:// or s3://.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Size of the tokenizer to train.")] = 32768,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json to use instead of training one.")
    ] = None,
    eos_token: Annotated[str, typer.Option("--eos-token", help="Token that ends every document.")] = "<|endoftext|>",
    held_out_fraction: Annotated[
        float, typer.Option("--held-out-fraction", help="Share of documents set apart for evaluation.")
    ] = 0.01,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Stop reading before the document that would pass it.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option("--shard-tokens", help="A shard is closed once it has as many.")] = 1
    << 24,
    as_json: AsJson = False,
) -> None:
    """Turn text into WebDataset shards with a tokenizer and two splits; started again after a kill, it continues."""
    from rich.console import Console

    from phalanx.cli.data_display import PrepareDisplay, print_report
    from phalanx.data.prepare import PrepareSettings, source_of
    from phalanx.data.prepare import prepare as run_preparation
    from phalanx.objects import open_store

    settings = PrepareSettings(vocab_size, tokenizer, eos_token, held_out_fraction, max_bytes, shard_tokens)
    with PrepareDisplay(Console(stderr=True)) as display:
        report: PrepareReport = run_preparation(source_of(source), open_store(out), settings, display.observe)
    if as_json:
        print_json(asdict(report))
    else:
        print_report(Console(), report)


def register_dataset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the dataset in the catalog.")],
    url: Url,
    request_id: Annotated[
        str, typer.Option("--request-id", help="Repeat a request under its id: the answer is the same.")
    ] = "",
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Add what `phalanx data prepare` wrote to the catalog of the services."""
    with open_client(context) as client:
        version = client.register(name, url, request_id=request_id)
    facts = asdict(version)
    if as_json:
        print_json(facts)
        return
    splits = ", ".join(f"{split.name} {split.num_tokens:,} tokens" for split in version.splits)
    typer.echo(f"{version.dataset} version {version.version}: {splits}")


def ls(url: Url, as_json: AsJson = False) -> None:
    """List the splits at or below a URL."""
    from phalanx.data.catalog import splits_at
    from phalanx.objects import open_store

    rows = [found.facts() for found in splits_at(open_store(url))]
    if as_json:
        print_json({"url": url, "splits": rows})
    else:
        columns = ("path", "name", "is_held_out", "shards", "documents", "tokens", "bytes", "digest")
        print_table(columns, ([row[column] for column in columns] for row in rows))


def show(url: Url, as_json: AsJson = False) -> None:
    """Show a split, or every split of a dataset, with the recipe it was made by."""
    from phalanx.data.catalog import splits_at
    from phalanx.objects import open_store

    splits = [{**found.facts(), "recipe": found.split.recipe} for found in splits_at(open_store(url))]
    if as_json:
        print_json({"url": url, "splits": splits})
        return
    for split in splits:
        for key, value in split.items():
            typer.echo(f"{key:<18} {value}")
        typer.echo("")


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|JOB",
            help="Dataset or split folder (a URL), a job file (.toml), or name of a submitted job.",
            show_default=False,
        ),
    ],
    context: Context = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset against its digests; or, for a job, prove from the step records that its run
    read each window exactly once. Exit 1 where something is damaged or does not hold.
    """
    from phalanx.cli.named import job_of

    if "://" in target:
        _verify_dataset(target, as_json)
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
        if not proof.steps:
            typer.echo("no checkpoint is committed yet: there is nothing to prove")
    if not proof.ok:
        raise typer.Exit(1)


def _verify_dataset(url: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from phalanx.data.catalog import splits_at
    from phalanx.data.verification import verify_split, verify_tokenizers
    from phalanx.objects import open_store

    root = open_store(url)
    splits, checks = splits_at(root), 0
    damages = [*verify_tokenizers(root, splits)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=sum(found.split.num_shards for found in splits))
        for found in splits:
            for check in verify_split(found.store, found.split):
                checks += 1
                damages += [(found.path, damage) for damage in check.damages]
                progress.advance(task)
    if as_json:
        rows = [{"path": path, **asdict(damage)} for path, damage in damages]
        print_json({"url": url, "shards": checks, "ok": not damages, "damages": rows})
    else:
        for path, damage in damages:
            typer.echo(f"{path}/{damage}".lstrip("/"))
        typer.echo(f"{checks} shards checked, {len(damages)} damages")
    if damages:
        raise typer.Exit(1)


def trace(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Job file, or name of a submitted job.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option("--step", help="Show the documents of this step's batch.")] = None,
    document: Annotated[
        str | None, typer.Option("--document", metavar="ID", help="Show the steps that see this document.")
    ] = None,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Passes over the data to follow a document through.")
    ] = 2,
    context: Context = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say which documents a step trains on, or which steps train on a document; without reading a token."""
    if (step is None) == (document is None):
        raise PhalanxError("phalanx data trace", expected="either --step N or --document ID", remedy="give one of them")
    from phalanx.cli.named import job_of

    tracer = _tracer(job_of(job, overrides or (), context))
    if step is not None:
        rows = [asdict(segment) for segment in tracer.step(step)]
        subject: dict[str, Any] = {"step": step, "segments": rows}
    else:
        rows = [asdict(visit) for visit in tracer.document(str(document), epochs)]
        subject = {"document": document, "visits": rows}
    if as_json:
        print_json(subject)
    else:
        print_table(list(rows[0]), (list(row.values()) for row in rows))


def _tracer(job: Job) -> Tracer:
    """The tracer of a job's training split."""
    from phalanx.data.tracing import Tracer
    from phalanx.stream import open_split
    from phalanx.trainer.places import order_of, store_at

    store = store_at(job, job.data.train)
    split = open_split(store, job.data.train_digest)
    return Tracer(store, split, order_of(job, store, split), job.training.global_batch_size)
