"""What tokens say: their bytes and text, by a tokenizer.json.

Of a byte-level tokenizer (as in GPT-2, Llama 3, and those that `phalanx data prepare` trains) each token is a fixed
string of bytes, so any run of tokens has exact bytes, and text can be found in tokens without decoding them all. So it
is with byte fallback (as in Llama 2), but for one space at the beginning of a document. Any other tokenizer is asked
document by document. Special tokens, such as the end of text, say nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing, ObjectStore, StorageSettings, open_store

TOKENIZER_KEY = "tokenizer.json"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character for each byte in the vocabulary of a byte-level tokenizer (as published with GPT-2):
    itself where it is printable, else one from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}


class TokenText:
    """Decodes tokens. data: the bytes of tokenizer.json. Raises ValueError where they are none."""

    def __init__(self, data: bytes) -> None:
        try:
            self._file: dict[str, Any] = json.loads(data)
            self._data = data.decode()
            self._vocabulary = _vocabulary(self._file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tokenizer.json: {error}") from error

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of any tokens is their bytes."""
        return _is_byte_level(self._file.get("decoder"))

    @property
    def has_fixed_bytes(self) -> bool:
        """Whether each token is a fixed string of bytes."""
        return self.is_byte_level or _fallback_of(self._file.get("decoder")) is not None

    @property
    def strips_first_space(self) -> bool:
        """Whether a space at the beginning of a run of tokens is not part of its text."""
        fallback = _fallback_of(self._file.get("decoder"))
        return fallback is not None and fallback.strips

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token by id, empty for special and unused ids; only where they are fixed."""
        assert self.has_fixed_bytes
        alphabet, tokens, special = byte_alphabet(), self._vocabulary, _special_ids(self._file)
        fallback = _fallback_of(self._file.get("decoder"))
        table = [b""] * (max(tokens.values(), default=-1) + 1)
        for token, number in tokens.items():
            if number not in special:
                table[number] = _bytes_of(token, alphabet) if fallback is None else fallback.bytes_of(token)
        return table

    def decode(self, tokens: NDArray[np.integer[Any]] | Sequence[int]) -> str:
        """The text of a run of tokens; bytes that are no UTF-8 by themselves become U+FFFD."""
        ids = np.asarray(tokens).tolist()
        if self.is_byte_level:
            table = self.token_bytes
            return b"".join([table[each] for each in ids if each < len(table)]).decode(errors="replace")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def decode_many(self, documents: Sequence[NDArray[np.integer[Any]]]) -> list[str]:
        """The text of each document."""
        if self.is_byte_level:
            return [self.decode(document) for document in documents]
        texts: list[str] = self._tokenizer.decode_batch([d.tolist() for d in documents], skip_special_tokens=True)
        return texts

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._data)


def find_tokenizer(store: ObjectStore, digest: str, settings: StorageSettings | None = None) -> TokenText | None:
    """The tokenizer of that digest, in the split folder `store` or the one above it (opened with `settings`); None
    where none is there. Raises OutsideError for a file of another digest.
    """
    for folder in (store, folder_above(store.url, settings)):
        if folder is None:
            continue
        try:
            data = folder.read(TOKENIZER_KEY)
        except ObjectMissing:
            continue
        if sha256(data) != digest:
            raise OutsideError(f"{folder.url}/{TOKENIZER_KEY} is damaged: its digest is not {digest}")
        try:
            return TokenText(data)
        except ValueError as error:
            raise OutsideError(f"{folder.url}/{TOKENIZER_KEY}: {error}") from error
    return None


def folder_above(url: str, settings: StorageSettings | None = None) -> ObjectStore | None:
    """The folder above a URL; None above a bucket."""
    scheme, _, path = url.partition("://")
    folder, slash, _ = path.rstrip("/").rpartition("/")
    return open_store(f"{scheme}://{folder or slash}", settings) if slash else None


def _vocabulary(file: Mapping[str, Any]) -> dict[str, int]:
    """Token strings to ids, added ones included. A vocabulary is a table, or (Unigram) a list of pairs."""
    given = file["model"]["vocab"]
    vocabulary = {pair[0]: number for number, pair in enumerate(given)} if isinstance(given, list) else dict(given)
    vocabulary.update({added["content"]: added["id"] for added in file.get("added_tokens") or ()})
    return vocabulary


def _special_ids(file: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(added["id"] for added in file.get("added_tokens") or () if added.get("special"))


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders") or []
        return len(inner) == 1 and _is_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"


@dataclass(frozen=True, slots=True)
class _Fallback:
    """A decoder with byte fallback. replaced: strings of tokens and what they stand for, in order; strips: whether one
    space at the beginning goes.
    """

    replaced: tuple[tuple[str, str], ...]
    strips: bool

    def bytes_of(self, token: str) -> bytes:
        """A token's bytes."""
        for before, after in self.replaced:
            token = token.replace(before, after)
        match = _BYTE.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode(errors="surrogatepass")


def _fallback_of(decoder: Mapping[str, Any] | None) -> _Fallback | None:
    """What a decoder is if it has byte fallback and nothing that is not understood here, else None."""
    if decoder is None or decoder.get("type") != "Sequence":
        return None
    replaced, strips, kinds = [], False, []
    for step in decoder.get("decoders") or []:
        kinds.append(step.get("type"))
        if step.get("type") == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            strips = True
    known = ["Replace"] * len(replaced) + ["ByteFallback", "Fuse"] + ["Strip"] * strips
    return _Fallback(tuple(replaced), strips) if kinds == known else None


def _bytes_of(token: str, alphabet: Mapping[str, int]) -> bytes:
    """A token's bytes; one with a character that stands for no byte (an added token) is its own text."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode(errors="surrogatepass")
