"""`phalanx data prepare`: text to shards."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.output import print_json

if TYPE_CHECKING:
    from phalanx.data.prepare import PrepareReport


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("prepare")(prepare)


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
