"""The tokenizer of a dataset: a byte-level BPE trained on the training documents, or a given tokenizer.json, and how
text goes through it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.data.prepare.specials import is_spelled, unspelled
from phalanx.stream.shards import token_dtype

TRAINING_SAMPLE_BYTES = 256 << 20
LONGEST_RUN = 1024
_LONG_BLANK = re.compile(rf"\s{{{LONGEST_RUN + 1}}}")
_LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN + 1},}}|\s{{{LONGEST_RUN + 1},}}")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a manifest says of a tokenizer. digest: SHA-256 of tokenizer.json; vocab_size: highest id + 1."""

    digest: str
    vocab_size: int
    eos_id: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Stored type of a token."""
        return token_dtype(self.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class TextTokenizer:
    """Encodes documents. where: what errors call it."""

    facts: TokenizerFacts
    _tokenizer: Tokenizer
    where: str = "--tokenizer"

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Stored type of a token."""
        return self.facts.dtype

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger]]:
        """Tokens of each text with the end-of-text id appended, one array each, on the tokenizer's own threads.

        Text that spells a special token stays text: no document can end itself.
        Raises PhalanxError where the tokenizer has no tokens for some of the text.
        """
        strings = [text.decode() for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception for text that it has no tokens for
            raise PhalanxError(
                self.where,
                expected=f"a tokenizer that can encode all of the text ({' '.join(str(error).split())})",
                remedy="name one with a token for the unknown (unk_token) with --tokenizer, and another --out folder",
            ) from error
        return [self._ended(encoding.ids) for encoding in encodings]

    def _ended(self, ids: list[int]) -> NDArray[np.unsignedinteger]:
        ids.append(self.facts.eos_id)
        return np.array(ids, dtype=self.dtype)


def train_tokenizer(texts: Iterator[bytes], vocab_size: int, eos_token: str) -> bytes:
    """Bytes of tokenizer.json for a byte-level BPE (as in GPT-2) trained on `texts`; equal texts give equal bytes.

    Runs of more than LONGEST_RUN characters are cut first: the trainer takes time with the square of a word's length.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _cut_runs(text.decode())), trainer)
    return str(tokenizer.to_str(pretty=True)).encode()


def _cut_runs(text: str) -> Iterator[str]:
    """`text` in parts, so that no part has a longer run without white space, or of nothing else."""
    end = 0
    if max(map(len, text.split()), default=0) > LONGEST_RUN or _LONG_BLANK.search(text):
        for found in _LONG_RUN.finditer(text):
            yield text[end : found.start()]
            end = found.end()
            yield from (text[at : min(at + LONGEST_RUN, end)] for at in range(found.start(), end, LONGEST_RUN))
    yield text[end:]


def read_tokenizer_file(path: Path) -> bytes:
    """Bytes of a given tokenizer.json; raises PhalanxError where there is none."""
    try:
        if path.is_file():
            return path.read_bytes()
        remedy = "it is a folder: name the file in it" if path.is_dir() else "no such file: check the path"
    except OSError as error:
        remedy = f"it can't be read ({error.strerror}): check the file, its folders and their permissions"
    raise PhalanxError("--tokenizer", value=str(path), expected="a tokenizer.json file", remedy=remedy)


def load_tokenizer(data: bytes, eos_token: str, where: str = "--tokenizer") -> TextTokenizer:
    """A tokenizer from the bytes of tokenizer.json; raises PhalanxError where they are none, lack the end-of-text
    token, or give it for a text.
    """
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise PhalanxError(
            where, expected=f"a tokenizer.json of Hugging Face tokenizers ({error})", remedy="name such a file"
        ) from error
    eos_id = tokenizer.token_to_id(eos_token)
    if eos_id is None:
        raise PhalanxError(
            where,
            expected=f"a tokenizer that has the token {eos_token!r}",
            remedy="name its own end-of-text token with --eos-token",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    encoder = unspelled(tokenizer, eos_token)
    if is_spelled(encoder, (eos_token, tokenizer.decode([eos_id], False)), eos_id):
        raise PhalanxError(
            where,
            expected=f"a tokenizer in which no text becomes its end-of-text token {eos_token!r}",
            remedy="name a special token of it with --eos-token",
        )
    return TextTokenizer(TokenizerFacts(sha256(data), vocab_size, eos_id), encoder, where)


def training_sample(texts: Iterator[bytes], max_bytes: int = TRAINING_SAMPLE_BYTES) -> Iterator[bytes]:
    """The first texts until `max_bytes` are passed: what a tokenizer is trained on, so that its memory does not grow
    with the corpus.
    """
    total = 0
    for text in texts:
        if total >= max_bytes:
            return
        total += len(text)
        yield text
