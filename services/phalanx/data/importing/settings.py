"""What a user may choose about an import; all of it decides the bytes that come out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.data.importing.options import Understanding
from phalanx.data.importing.source import TokenSource
from phalanx.data.prepare.settings import END_OF_TEXT, MAX_VOCAB_SIZE
from phalanx.data.prepare.tokenizer import TokenizerFacts, read_tokenizer_file

RECIPE_FORMAT = "phalanx.import/1"


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """tokenizer: a tokenizer.json, copied into the dataset; or tokenizer_digest: its SHA-256 (`sha256:...`) alone, with
    vocab_size and eos_id. vocab_size: with a tokenizer at least its highest id + 1, which is taken where none is given.
    eos_id: where none is given that of `eos_token` (None: <|endoftext|>). held_out_fraction, drop_copies: by the
    content hash of a document's ids.
    """

    how: Understanding = field(default_factory=Understanding)
    tokenizer: Path | None = None
    tokenizer_digest: str | None = None
    vocab_size: int | None = None
    eos_id: int | None = None
    eos_token: str | None = None
    held_out_fraction: float = 0.0
    drop_copies: bool = False
    shard_tokens: int = 1 << 24

    def check(self) -> None:
        """Raises PhalanxError for a value out of range."""
        self.how.check()
        if not 0 <= self.held_out_fraction < 1:
            raise PhalanxError(
                "--held-out-fraction",
                value=self.held_out_fraction,
                expected="a number from 0 to below 1",
                remedy="lower it",
            )
        if self.eos_id is not None and self.eos_token is not None:
            raise PhalanxError(
                "--eos-token",
                value=self.eos_token,
                expected="no such option with --eos-id",
                remedy="leave one of them out",
            )
        if self.shard_tokens < 1:
            raise PhalanxError("--shard-tokens", value=self.shard_tokens, expected="1 or more", remedy="raise it")

    def vocabulary(self) -> tuple[TokenizerFacts, bytes | None]:
        """The tokenizer that the ids were made with, and the bytes of its tokenizer.json where it was given.

        Raises PhalanxError where the tokenizer, its vocabulary or its end-of-text id is not told, or they contradict
        each other.
        """
        if self.tokenizer is None:
            return self._told_by_digest(), None
        data = read_tokenizer_file(self.tokenizer)
        digest = sha256(data)
        if self.tokenizer_digest not in (None, digest):
            raise PhalanxError(
                "--tokenizer-digest", value=self.tokenizer_digest, expected=digest, remedy="it is of another tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise PhalanxError(
                "--tokenizer",
                value=str(self.tokenizer),
                expected=f"a tokenizer.json of Hugging Face tokenizers ({error})",
                remedy="name such a file",
            ) from error
        smallest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        vocab_size = smallest if self.vocab_size is None else self.vocab_size
        if not smallest <= vocab_size <= MAX_VOCAB_SIZE:
            raise PhalanxError(
                "--vocab-size",
                value=vocab_size,
                expected=f"a number from {smallest} (the tokenizer's) to {MAX_VOCAB_SIZE}",
                remedy="leave it out, or name the padded size",
            )
        eos_token = END_OF_TEXT if self.eos_token is None else self.eos_token
        eos_id = tokenizer.token_to_id(eos_token) if self.eos_id is None else self.eos_id
        if eos_id is None:
            raise PhalanxError(
                "--eos-token",
                value=eos_token,
                expected="a token of the tokenizer",
                remedy="name its end-of-text token, or --eos-id",
            )
        return self._facts(digest, vocab_size, eos_id), data

    def _told_by_digest(self) -> TokenizerFacts:
        if self.tokenizer_digest is None:
            raise PhalanxError(
                "--tokenizer",
                expected="the tokenizer that the ids were made with",
                remedy="name its tokenizer.json, or --tokenizer-digest with --vocab-size and --eos-id",
            )
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", self.tokenizer_digest):
            raise PhalanxError(
                "--tokenizer-digest",
                value=self.tokenizer_digest,
                expected="sha256: and 64 hexadecimal digits",
                remedy="as `sha256sum tokenizer.json` prints them",
            )
        if self.vocab_size is None or self.eos_id is None:
            missing = "--vocab-size" if self.vocab_size is None else "--eos-id"
            raise PhalanxError(missing, expected="a number, which a digest does not tell", remedy="name it")
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise PhalanxError(
                "--vocab-size",
                value=self.vocab_size,
                expected=f"a number from 1 to {MAX_VOCAB_SIZE}",
                remedy="it is the highest id + 1",
            )
        return self._facts(self.tokenizer_digest, self.vocab_size, self.eos_id)

    def _facts(self, digest: str, vocab_size: int, eos_id: int) -> TokenizerFacts:
        if not 0 <= eos_id < vocab_size:
            raise PhalanxError(
                "--eos-id", value=eos_id, expected=f"an id from 0 to {vocab_size - 1}", remedy="check --vocab-size"
            )
        return TokenizerFacts(digest, vocab_size, eos_id)


def recipe_of(
    settings: ImportSettings, source: TokenSource, facts: TokenizerFacts, *, has_tokenizer: bool
) -> dict[str, Any]:
    """The settings that decide the bytes of a dataset."""
    return {
        "format": RECIPE_FORMAT,
        "source_format": source.format.value,
        "boundaries": source.boundaries.value,
        "column": settings.how.column,
        "id_column": settings.how.id_column,
        "dtype": settings.how.dtype,
        "skip_bytes": settings.how.skip_bytes,
        "sequences": settings.how.sequences,
        "tokenizer_digest": facts.digest,
        "has_tokenizer": has_tokenizer,
        "vocab_size": facts.vocab_size,
        "eos_id": facts.eos_id,
        "held_out_fraction": settings.held_out_fraction,
        "drop_copies": settings.drop_copies,
        "shard_tokens": settings.shard_tokens,
    }
