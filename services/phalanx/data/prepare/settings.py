"""What a user may choose about a preparation; all of it decides the bytes that come out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.rules import ANY_LENGTH, Lengths
from phalanx.data.prepare.specials import can_be_learnt

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
MAX_VOCAB_SIZE = 1 << 24  # the trainer takes memory for all of it at once


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """vocab_size: of the tokenizer to train; unused where `tokenizer` names a ready tokenizer.json.

    eos_token: appended to every document. held_out_fraction: share of documents (by content hash) set apart for
    evaluation. max_bytes: reading stops before the document that would pass it (None: read all). shard_tokens: a shard
    is closed once it has as many. lengths: which documents are kept by their length.
    """

    vocab_size: int = 32768
    tokenizer: Path | None = None
    eos_token: str = END_OF_TEXT
    held_out_fraction: float = 0.01
    max_bytes: int | None = None
    shard_tokens: int = 1 << 24
    lengths: Lengths = ANY_LENGTH

    def check(self) -> None:
        """Raises PhalanxError for a value out of range."""
        self.lengths.check()
        if not self.eos_token or not self.eos_token.isprintable():
            raise PhalanxError(
                "--eos-token",
                value=self.eos_token,
                expected="printable text that is not empty",
                remedy="name a token, or leave the option out",
            )
        if self.tokenizer is None:
            self._check_trained()
        if not 0 <= self.held_out_fraction < 1:
            raise PhalanxError(
                "--held-out-fraction",
                value=self.held_out_fraction,
                expected="a share from 0 to below 1",
                remedy="change it",
            )
        if self.shard_tokens < 1:
            raise PhalanxError("--shard-tokens", value=self.shard_tokens, expected="1 or more", remedy="raise it")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise PhalanxError(
                "--max-bytes", value=self.max_bytes, expected="1 or more", remedy="raise it or leave it out"
            )

    def _check_trained(self) -> None:
        if can_be_learnt(self.eos_token):
            raise PhalanxError(
                "--eos-token",
                value=self.eos_token,
                expected="a token that no text becomes, of more than one word",
                remedy=f"name one like {END_OF_TEXT}",
            )
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise PhalanxError(
                "--vocab-size",
                value=self.vocab_size,
                expected=f"at least {MIN_VOCAB_SIZE} (256 bytes and {self.eos_token})",
                remedy="raise it",
            )
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise PhalanxError(
                "--vocab-size", value=self.vocab_size, expected=f"at most {MAX_VOCAB_SIZE}", remedy="lower it"
            )
