"""Options that `phalanx data prepare` and `phalanx data import` share."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.data.arguments import lasting
from phalanx.cli.places import given

Out = Annotated[
    str,
    typer.Option(
        "--out", metavar="URL", help="Where the dataset goes: file:// or s3://.", parser=given, callback=lasting
    ),
]
HeldOutFraction = Annotated[
    float, typer.Option("--held-out-fraction", help="Share of documents set apart for evaluation.")
]
ShardTokens = Annotated[int, typer.Option("--shard-tokens", help="A shard is closed once it has as many.")]
PartOfWork = Annotated[
    str | None,
    typer.Option("--part", metavar="I/N", help="Do only part I of N, as in an array of jobs; then `data merge`."),
]
SHARD_TOKENS = 1 << 24
VOCAB_SIZE = 32768
EOS_TOKEN = "<|endoftext|>"
