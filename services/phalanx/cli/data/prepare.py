"""`phalanx data prepare` and `phalanx data merge`: text to shards, on one machine, on many, or on Spark."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.data.arguments import refuse
from phalanx.cli.data.options import EOS_TOKEN, SHARD_TOKENS, VOCAB_SIZE, HeldOutFraction, Out, PartOfWork, ShardTokens
from phalanx.cli.output import print_json
from phalanx.cli.places import given, given_path

if TYPE_CHECKING:
    from phalanx.data.prepare import PrepareReport


def register(group: typer.Typer) -> None:
    """Adds the commands to the `data` group."""
    group.command("prepare")(prepare)
    group.command("merge")(merge)


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            parser=given,
            help="Files, folders, patterns (in quotes) or s3:// URLs: text and source files, .jsonl, .parquet, .tar; "
            ".gz and .zst too.",
        ),
    ],
    out: Out,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", help="Size of the tokenizer to train.", show_default=str(VOCAB_SIZE))
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer.json to use instead of training one.",
            parser=given_path,
        ),
    ] = None,
    eos_token: Annotated[str, typer.Option("--eos-token", help="Token that ends every document.")] = EOS_TOKEN,
    text_field: Annotated[str, typer.Option("--text-field", help="Field of a record that holds its text.")] = "text",
    id_field: Annotated[
        str | None, typer.Option("--id-field", help="Field of a record that holds its id.", show_default="id, if any")
    ] = None,
    min_chars: Annotated[int | None, typer.Option("--min-chars", help="Leave out shorter documents.")] = None,
    max_chars: Annotated[int | None, typer.Option("--max-chars", help="Leave out longer documents.")] = None,
    held_out_fraction: HeldOutFraction = 0.01,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Stop reading before the document that would pass it.")
    ] = None,
    shard_tokens: ShardTokens = SHARD_TOKENS,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Worker processes.", show_default="all cores")
    ] = None,
    part: PartOfWork = None,
    engine: Annotated[str, typer.Option("--engine", help="Who does the work: local or spark.")] = "local",
    spark_master: Annotated[
        str | None,
        typer.Option(
            "--spark-master", metavar="URL", parser=given, help="Spark master, as local[8] or spark://host:7077."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into WebDataset shards with a tokenizer and two splits; started again after a kill, it continues."""
    from rich.console import Console

    from phalanx.cli.data_display import PrepareDisplay, print_left_out, print_part
    from phalanx.data.prepare import Fields, Lengths, Part, PrepareSettings, prepare_part, source_of
    from phalanx.data.prepare import engine as engine_of
    from phalanx.data.prepare import prepare as run_preparation
    from phalanx.objects import open_store

    if tokenizer is not None:
        refuse({"--vocab-size": vocab_size}, "--tokenizer")
    size, lengths = VOCAB_SIZE if vocab_size is None else vocab_size, Lengths(min_chars, max_chars)
    settings = PrepareSettings(size, tokenizer, eos_token, held_out_fraction, max_bytes, shard_tokens, lengths)
    settings.check()
    chosen = None if part is None else Part.parse(part)
    runs, store = engine_of(engine, workers, spark_master), open_store(out)
    source = source_of(inputs, Fields(text_field, id_field))
    print_left_out(Console(stderr=True), source.left_out)
    with PrepareDisplay(Console(stderr=True)) as display:
        if chosen is not None:
            made = prepare_part(source, store, settings, chosen, display.observe, runs)
        else:
            report = run_preparation(source, store, settings, display.observe, runs)
    if chosen is not None:
        print_json(asdict(made)) if as_json else print_part(Console(), made)
    else:
        show_report(report, as_json, expects_held_out=held_out_fraction > 0)


def merge(out: Out, as_json: AsJson = False) -> None:
    """Assemble a dataset from what the parts of `prepare` or `import` made; names the pieces that are missing."""
    from rich.console import Console

    from phalanx.cli.data_display import PrepareDisplay
    from phalanx.data.importing import import_recipe
    from phalanx.data.importing import merge as merge_import
    from phalanx.data.prepare import merge as run_merge
    from phalanx.data.prepare.claim import read_claim
    from phalanx.objects import open_store

    store = open_store(out)
    recipe = import_recipe(store)
    with PrepareDisplay(Console(stderr=True)) as display:
        report = run_merge(store, display.observe) if recipe is None else merge_import(store, recipe, display.observe)
    settings = recipe if recipe is not None else read_claim(store)[0]
    show_report(report, as_json, expects_held_out=settings["held_out_fraction"] > 0)


def show_report(report: PrepareReport, as_json: bool, *, expects_held_out: bool) -> None:
    """Prints what came out; see `print_report`."""
    from rich.console import Console

    from phalanx.cli.data_display import print_report

    if as_json:
        print_json(asdict(report))
    else:
        print_report(Console(), report, expects_held_out=expects_held_out)
