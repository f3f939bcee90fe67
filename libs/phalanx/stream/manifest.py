"""The manifest of a split: what shards there are, how much each holds, and the digests that guard them; columnar, one
JSON object.

A split folder holds `manifest.json` and, for each shard, `<shard>.tar`, `<shard>.index.safetensors` and
`<shard>.ids.json`. The dataset digest is the SHA-256 of the manifest's bytes; through the digests in it, it names every
byte of the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from phalanx.core.digest import canonical_json, sha256
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.shards import token_dtype

MANIFEST_KEY = "manifest.json"
FORMAT: Literal["phalanx.split/1"] = "phalanx.split/1"


class ShardColumns(BaseModel):
    """One entry a shard in every list; digests are `xxh3:` of the whole object."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    names: list[str]
    bytes: list[PositiveInt]
    documents: list[PositiveInt]
    tokens: list[PositiveInt]
    digests: list[str]
    index_digests: list[str]
    ids_digests: list[str]


class ManifestFile(BaseModel):
    """The JSON of `manifest.json`, checked key by key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    format: Literal["phalanx.split/1"]
    name: str
    is_held_out: bool
    tokenizer_digest: str
    vocab_size: PositiveInt
    eos_id: NonNegativeInt
    token_dtype: Literal["uint16", "uint32"]
    num_documents: PositiveInt
    num_tokens: PositiveInt
    recipe: dict[str, Any]
    shards: ShardColumns

    def contradiction(self) -> str | None:
        """What in this manifest contradicts itself, or None."""
        columns = self.shards
        lengths = {name: len(column) for name, column in columns}
        if len(set(lengths.values())) != 1:
            return f"shard columns of different lengths {lengths}"
        if len(set(columns.names)) != len(columns.names):
            return "a shard named twice"
        if sum(columns.documents) != self.num_documents or sum(columns.tokens) != self.num_tokens:
            return "totals that are not the sums of the shards"
        if token_dtype(self.vocab_size).name != self.token_dtype or self.eos_id >= self.vocab_size:
            return "a token type or end-of-text id that does not fit the vocabulary"
        return None


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard's row of the manifest."""

    name: str
    num_bytes: int
    num_documents: int
    num_tokens: int
    digest: str
    index_digest: str
    ids_digest: str


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A verified manifest. shard_documents and shard_tokens: int64 [num_shards]; digest: the dataset digest,
    `sha256:...`.
    """

    url: str
    digest: str
    name: str
    is_held_out: bool
    tokenizer_digest: str
    vocab_size: int
    eos_id: int
    dtype: np.dtype[np.unsignedinteger]
    num_documents: int
    num_tokens: int
    recipe: dict[str, Any]
    shard_documents: NDArray[np.int64]
    shard_tokens: NDArray[np.int64]
    columns: ShardColumns = field(repr=False)

    @property
    def num_shards(self) -> int:
        """Shards in the split."""
        return len(self.columns.names)

    def shard(self, number: int) -> ShardEntry:
        """The manifest's row of shard `number`."""
        c = self.columns
        return ShardEntry(
            c.names[number],
            c.bytes[number],
            c.documents[number],
            c.tokens[number],
            c.digests[number],
            c.index_digests[number],
            c.ids_digests[number],
        )


def tar_key(shard_name: str) -> str:
    """Key of a shard's tar in its split folder."""
    return f"{shard_name}.tar"


def index_key(shard_name: str) -> str:
    """Key of a shard's length index in its split folder."""
    return f"{shard_name}.index.safetensors"


def ids_key(shard_name: str) -> str:
    """Key of a shard's list of document ids in its split folder."""
    return f"{shard_name}.ids.json"


def encode_manifest(
    shards: Sequence[ShardEntry],
    *,
    name: str,
    is_held_out: bool,
    tokenizer_digest: str,
    vocab_size: int,
    eos_id: int,
    recipe: dict[str, Any],
) -> bytes:
    """The bytes of `manifest.json` (canonical JSON: equal content, equal bytes)."""
    columns = ShardColumns(
        names=[s.name for s in shards],
        bytes=[s.num_bytes for s in shards],
        documents=[s.num_documents for s in shards],
        tokens=[s.num_tokens for s in shards],
        digests=[s.digest for s in shards],
        index_digests=[s.index_digest for s in shards],
        ids_digests=[s.ids_digest for s in shards],
    )
    dtype = token_dtype(vocab_size).name
    assert dtype in ("uint16", "uint32")
    manifest = ManifestFile(
        format=FORMAT,
        name=name,
        is_held_out=is_held_out,
        tokenizer_digest=tokenizer_digest,
        vocab_size=vocab_size,
        eos_id=eos_id,
        token_dtype="uint16" if dtype == "uint16" else "uint32",
        num_documents=sum(columns.documents),
        num_tokens=sum(columns.tokens),
        recipe=recipe,
        shards=columns,
    )
    problem = manifest.contradiction()
    assert problem is None, problem
    return canonical_json(manifest.model_dump())


def open_split(store: ObjectStore, expected_digest: str | None = None) -> Split:
    """Reads and checks the manifest of the split folder that `store` is rooted at.

    expected_digest: the dataset digest that it must have (None: any). Raises PhalanxError where there is no manifest,
    another format, a contradiction in it, or another digest.
    """
    try:
        data = store.read(MANIFEST_KEY)
    except ObjectMissing:
        raise _no_manifest(store) from None
    digest = sha256(data)
    if expected_digest is not None and digest != expected_digest:
        raise PhalanxError(
            store.url,
            value=digest,
            expected=f"dataset digest {expected_digest}",
            remedy="name the dataset that the job was written for",
        )
    return _split_of(store.url, digest, _parse(store.url, data))


def refuse_held_out(split: Split, where: str = "data.train") -> None:
    """Raises PhalanxError where `split` was set apart for evaluation."""
    if split.is_held_out:
        raise PhalanxError(
            where,
            value=split.url,
            expected="a training split",
            remedy=f"{split.name!r} was held out for evaluation: name the train folder here, this one as data.held_out",
        )


def _parse(url: str, data: bytes) -> ManifestFile:
    where = f"{url}/{MANIFEST_KEY}"
    remedy = "prepare the dataset again into an empty folder, or use the version of Phalanx that wrote it"
    try:
        manifest = ManifestFile.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PhalanxError(
            where, expected=f"a manifest of format {FORMAT} ({place}: {first['msg']})", remedy=remedy
        ) from error
    problem = manifest.contradiction()
    if problem is not None:
        raise PhalanxError(where, expected=f"a manifest that agrees with itself, found {problem}", remedy=remedy)
    return manifest


def _split_of(url: str, digest: str, manifest: ManifestFile) -> Split:
    return Split(
        url=url,
        digest=digest,
        name=manifest.name,
        is_held_out=manifest.is_held_out,
        tokenizer_digest=manifest.tokenizer_digest,
        vocab_size=manifest.vocab_size,
        eos_id=manifest.eos_id,
        dtype=token_dtype(manifest.vocab_size),
        num_documents=manifest.num_documents,
        num_tokens=manifest.num_tokens,
        recipe=manifest.recipe,
        shard_documents=np.array(manifest.shards.documents, dtype=np.int64),
        shard_tokens=np.array(manifest.shards.tokens, dtype=np.int64),
        columns=manifest.shards,
    )


def _no_manifest(store: ObjectStore) -> PhalanxError:
    below = sorted(o.key.removesuffix(f"/{MANIFEST_KEY}") for o in store.list() if o.key.endswith(f"/{MANIFEST_KEY}"))
    remedy = "make one with `phalanx data prepare INPUT --out URL`"
    if below:
        remedy = f"name one of the split folders below it: {', '.join(below[:4])}"
    return PhalanxError(store.url, expected=f"a split folder that holds {MANIFEST_KEY}", remedy=remedy)
