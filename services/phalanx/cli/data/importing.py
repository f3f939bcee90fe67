"""`phalanx data import`: tokens that are there already to shards."""

from __future__ import annotations

import enum
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.data.options import EOS_TOKEN, SHARD_TOKENS, HeldOutFraction, Out, PartOfWork, ShardTokens
from phalanx.cli.data.prepare import show_report
from phalanx.cli.output import print_json
from phalanx.cli.places import given, given_path
from phalanx.core.errors import PhalanxError

Kind = TypeVar("Kind", bound=enum.Enum)


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("import")(import_tokens)


Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        parser=given,
        help="Files, folders, prefixes of Megatron or s3:// URLs: an MDS folder, .bin/.idx, what save_to_disk "
        "wrote, .arrow, .parquet, .npy, raw .bin.",
    ),
]
InputFormat = Annotated[
    str | None,
    typer.Option("--format", help="mds, megatron, arrow, parquet, npy or raw.", show_default="as the files say"),
]
WhereDocumentsEnd = Annotated[
    str | None,
    typer.Option(
        "--boundaries",
        help="Where documents end. rows: each row is one; eos: rows lie end to end, cut behind each EOS id.",
        show_default="rows; eos for raw files",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="The tokenizer.json that the ids were made with; it is copied.",
        parser=given_path,
    ),
]
TokenizerDigest = Annotated[
    str | None,
    typer.Option("--tokenizer-digest", metavar="sha256:...", help="Its SHA-256 alone, where it is not at hand."),
]
VocabSize = Annotated[
    int | None, typer.Option("--vocab-size", help="Highest id + 1, or more.", show_default="the tokenizer's")
]
EosId = Annotated[int | None, typer.Option("--eos-id", help="Id that ends a text.", show_default="that of --eos-token")]
EosToken = Annotated[str | None, typer.Option("--eos-token", help="Token that ends a text.", show_default=EOS_TOKEN)]
Column = Annotated[
    str | None,
    typer.Option("--column", help="Column of ids (MDS, arrow, parquet).", show_default="input_ids, tokens, ..."),
]
IdColumn = Annotated[str | None, typer.Option("--id-column", help="Column that names a row.", show_default="FILE#ROW")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Type of ids in raw files and MDS bytes columns, as uint16.")
]
SkipBytes = Annotated[int, typer.Option("--skip-bytes", help="Header of each raw file.")]
Sequences = Annotated[bool, typer.Option("--sequences", help="Megatron: each sequence is a row, not each document.")]
DropCopies = Annotated[bool, typer.Option("--drop-copies", help="Of documents with equal ids keep only the first.")]
Threads = Annotated[int | None, typer.Option("--workers", help="Threads.", show_default="all cores")]


def import_tokens(
    inputs: Inputs,
    out: Out,
    input_format: InputFormat = None,
    boundaries: WhereDocumentsEnd = None,
    tokenizer: TokenizerFile = None,
    tokenizer_digest: TokenizerDigest = None,
    vocab_size: VocabSize = None,
    eos_id: EosId = None,
    eos_token: EosToken = None,
    column: Column = None,
    id_column: IdColumn = None,
    dtype: Dtype = None,
    skip_bytes: SkipBytes = 0,
    sequences: Sequences = False,
    held_out_fraction: HeldOutFraction = 0.0,
    drop_copies: DropCopies = False,
    shard_tokens: ShardTokens = SHARD_TOKENS,
    workers: Threads = None,
    part: PartOfWork = None,
    as_json: AsJson = False,
) -> None:
    """Turn tokens that you have into WebDataset shards, untouched: every id, their order and the documents' boundaries
    stay. Started again after a kill, it continues.
    """
    from rich.console import Console

    from phalanx.cli.data_display import PrepareDisplay, print_part
    from phalanx.data.importing import Boundaries, Format, ImportSettings, Understanding, import_part
    from phalanx.data.importing import import_tokens as run_import
    from phalanx.data.prepare import Part
    from phalanx.data.prepare.engines import num_cores
    from phalanx.objects import open_store

    how = Understanding(
        format=_choice("--format", input_format, Format),
        boundaries=_choice("--boundaries", boundaries, Boundaries),
        column=column,
        id_column=id_column,
        dtype=dtype,
        skip_bytes=skip_bytes,
        sequences=sequences,
    )
    settings = ImportSettings(
        how=how,
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest,
        vocab_size=vocab_size,
        eos_id=eos_id,
        eos_token=eos_token,
        held_out_fraction=held_out_fraction,
        drop_copies=drop_copies,
        shard_tokens=shard_tokens,
    )
    chosen, threads = None if part is None else Part.parse(part), num_cores() if workers is None else workers
    if threads < 1:
        raise PhalanxError("--workers", value=workers, expected="1 or more", remedy="raise it or leave it out")
    store = open_store(out)
    with PrepareDisplay(Console(stderr=True), chunks="import") as display:
        if chosen is not None:
            made = import_part(inputs, store, settings, chosen, display.observe, threads)
        else:
            report = run_import(inputs, store, settings, display.observe, threads)
    if chosen is not None:
        print_json(asdict(made)) if as_json else print_part(Console(), made)
    else:
        show_report(report, as_json, expects_held_out=held_out_fraction > 0)


def _choice(option: str, given: str | None, kind: type[Kind]) -> Kind | None:
    """The member that the user named; raises PhalanxError for another word."""
    if given is None:
        return None
    names = [str(member.value) for member in kind]
    if given not in names:
        raise PhalanxError(option, value=given, expected=f"one of {', '.join(names)}", remedy="change it")
    return kind(given)
