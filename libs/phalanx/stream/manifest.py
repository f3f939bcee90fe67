"""The manifest of a split: what shards there are, how much each holds, and the digests that guard them.

A split folder holds `manifest.json` and, for each shard, `<shard>.tar`, `<shard>.index.safetensors` and
`<shard>.ids.json`. The dataset digest is the SHA-256 of the manifest's bytes; through the digests in it, it names every
byte of the split. Up to `INLINE_SHARDS` shards their columns stand in the JSON itself; above, `shards.safetensors`
holds them and the JSON gives its digest: it is mapped, so that all processes of a node share it (`node_copy`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    Tag,
    ValidationError,
)

from phalanx.core.digest import canonical_json, sha256
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.node_copy import mapped_object
from phalanx.stream.shard_table import (
    MalformedTable,
    NumberedNames,
    ShardEntry,
    ShardTable,
    decode_table,
    digest_column,
    digest_strings,
    numbered_or_listed,
    table_of,
)
from phalanx.stream.shards import token_dtype

__all__ = [
    "INLINE_SHARDS",
    "MANIFEST_KEY",
    "ShardEntry",
    "Split",
    "encode_manifest",
    "ids_key",
    "index_key",
    "manifest_objects",
    "open_split",
    "refuse_held_out",
    "tar_key",
]

MANIFEST_KEY, TABLE_KEY = "manifest.json", "shards.safetensors"
FORMAT: Literal["phalanx.split/1"] = "phalanx.split/1"
INLINE_SHARDS = 4096
_MAX_FOLDERS_LOOKED_AT = 8
_REMEDY = "prepare the dataset again into an empty folder, or use the version of Phalanx that wrote it"

_Count = Annotated[int, Field(gt=0, lt=1 << 53)]
_Digest = Annotated[str, StringConstraints(pattern=r"^xxh3:[0-9a-f]{32}$")]


class ShardColumns(BaseModel):
    """One entry a shard in every list; digests are `xxh3:` of the whole object."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    names: list[str]
    bytes: list[_Count]
    documents: list[_Count]
    tokens: list[_Count]
    digests: list[_Digest]
    index_digests: list[_Digest]
    ids_digests: list[_Digest]

    def lengths(self) -> dict[str, int]:
        """How many entries each column has."""
        return {name: len(column) for name, column in self}

    def table(self) -> ShardTable:
        """The same as arrays; the columns must be of one length."""
        return ShardTable(
            numbered_or_listed(self.names),
            np.array(self.bytes, np.int64),
            np.array(self.documents, np.int64),
            np.array(self.tokens, np.int64),
            digest_column(self.digests),
            digest_column(self.index_digests),
            digest_column(self.ids_digests),
        )


class NameRule(BaseModel):
    """Shards are named by the prefix and their number, from 0, in at least so many digits."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    prefix: str
    digits: Annotated[int, Field(gt=0, le=20)]


class ShardTableFile(BaseModel):
    """Where the columns lie that do not stand in the JSON: an object beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    table: Literal["shards.safetensors"]
    count: Annotated[int, Field(gt=0, le=1 << 32)]
    bytes: PositiveInt
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    names: NameRule


def _kind_of_shards(value: object) -> str:
    is_table = isinstance(value, ShardTableFile) or (isinstance(value, dict) and "table" in value)
    return "table" if is_table else "columns"


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
    shards: Annotated[
        Annotated[ShardColumns, Tag("columns")] | Annotated[ShardTableFile, Tag("table")],
        Discriminator(_kind_of_shards),
    ]

    def contradiction(self, table: ShardTable) -> str | None:
        """What in this manifest and its table contradicts itself, or None."""
        if min(column.min(initial=1) for column in (table.num_bytes, table.num_documents, table.num_tokens)) < 1:
            return "a shard without a byte, document or token"
        if isinstance(table.names, tuple) and len(set(table.names)) != len(table):
            return "a shard named twice"
        if int(table.num_documents.sum()) != self.num_documents or int(table.num_tokens.sum()) != self.num_tokens:
            return "totals that are not the sums of the shards"
        if token_dtype(self.vocab_size).name != self.token_dtype or self.eos_id >= self.vocab_size:
            return "a token type or end-of-text id that does not fit the vocabulary"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A verified manifest. digest: the dataset digest, `sha256:...`."""

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
    columns: ShardTable = field(repr=False)

    @property
    def num_shards(self) -> int:
        """Shards in the split."""
        return len(self.columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars."""
        return int(self.columns.num_bytes.sum())

    @property
    def shard_documents(self) -> NDArray[np.int64]:
        """Documents of each shard, int64 [num_shards]."""
        return self.columns.num_documents

    @property
    def shard_tokens(self) -> NDArray[np.int64]:
        """Tokens of each shard, int64 [num_shards]."""
        return self.columns.num_tokens

    def shard(self, number: int) -> ShardEntry:
        """The manifest's row of shard `number`."""
        return self.columns.row(number)

    def number_of(self, shard_name: str) -> int | None:
        """The number of the shard with this name, None where there is none."""
        try:
            return self.columns.names.index(shard_name)
        except ValueError:
            return None


def tar_key(shard_name: str) -> str:
    """Key of a shard's tar in its split folder."""
    return f"{shard_name}.tar"


def index_key(shard_name: str) -> str:
    """Key of a shard's length index in its split folder."""
    return f"{shard_name}.index.safetensors"


def ids_key(shard_name: str) -> str:
    """Key of a shard's list of document ids in its split folder."""
    return f"{shard_name}.ids.json"


def manifest_objects(
    shards: Iterable[ShardEntry] | ShardTable,
    *,
    name: str,
    is_held_out: bool,
    tokenizer_digest: str,
    vocab_size: int,
    eos_id: int,
    recipe: dict[str, Any],
    inline_shards: int = INLINE_SHARDS,
) -> tuple[tuple[str, bytes], ...]:
    """The objects of a manifest, (key, bytes), in the order in which they must be created: `manifest.json`, which makes
    the split exist, is the last. Equal content, equal bytes.

    More than `inline_shards` shards that are named by a rule go to a table of their own.
    """
    table = shards if isinstance(shards, ShardTable) else table_of(shards)
    dtype = token_dtype(vocab_size).name
    assert dtype in ("uint16", "uint32")
    objects: list[tuple[str, bytes]] = []
    columns: ShardColumns | ShardTableFile
    if len(table) > inline_shards and isinstance(table.names, NumberedNames):
        data = table.encode()
        objects.append((TABLE_KEY, data))
        columns = ShardTableFile(
            table="shards.safetensors",
            count=len(table),
            bytes=len(data),
            digest=sha256(data),
            names=NameRule(prefix=table.names.prefix, digits=table.names.digits),
        )
    else:
        columns = _inline(table)
    manifest = ManifestFile(
        format=FORMAT,
        name=name,
        is_held_out=is_held_out,
        tokenizer_digest=tokenizer_digest,
        vocab_size=vocab_size,
        eos_id=eos_id,
        token_dtype="uint16" if dtype == "uint16" else "uint32",
        num_documents=int(table.num_documents.sum()),
        num_tokens=int(table.num_tokens.sum()),
        recipe=recipe,
        shards=columns,
    )
    problem = manifest.contradiction(table)
    assert problem is None, problem
    objects.append((MANIFEST_KEY, canonical_json(manifest.model_dump())))
    return tuple(objects)


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
    """The bytes of a `manifest.json` that holds its columns itself, as those of few shards do."""
    assert len(shards) <= INLINE_SHARDS, "use manifest_objects"
    ((_, data),) = manifest_objects(
        shards,
        name=name,
        is_held_out=is_held_out,
        tokenizer_digest=tokenizer_digest,
        vocab_size=vocab_size,
        eos_id=eos_id,
        recipe=recipe,
    )
    return data


def _inline(table: ShardTable) -> ShardColumns:
    return ShardColumns(
        names=list(table.names),
        bytes=table.num_bytes.tolist(),
        documents=table.num_documents.tolist(),
        tokens=table.num_tokens.tolist(),
        digests=digest_strings(table.digests),
        index_digests=digest_strings(table.index_digests),
        ids_digests=digest_strings(table.ids_digests),
    )


def has_manifest(store: ObjectStore) -> bool:
    """Whether `store` is rooted at a split; raises the store's error where it can't tell."""
    try:
        store.info(MANIFEST_KEY)
    except ObjectMissing:
        return False
    return True


def open_split(store: ObjectStore, expected_digest: str | None = None, node_folder: Path | None = None) -> Split:
    """Reads and checks the manifest of the split folder that `store` is rooted at.

    expected_digest: the dataset digest that it must have (None: any). node_folder: where processes of this node share
    the table of a large one (None: below TMPDIR). Raises PhalanxError where there is no manifest, another format, a
    contradiction in it, or another digest; OutsideError where its table is missing or damaged.
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
    manifest = _parse(store.url, data)
    table = _table_of(store, manifest, node_folder)
    problem = manifest.contradiction(table)
    if problem is not None:
        raise _contradicts(store.url, problem)
    return _split_of(store.url, digest, manifest, table)


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
    try:
        return ManifestFile.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PhalanxError(
            f"{url}/{MANIFEST_KEY}", expected=f"a manifest of format {FORMAT} ({place}: {first['msg']})", remedy=_REMEDY
        ) from error


def _table_of(store: ObjectStore, manifest: ManifestFile, node_folder: Path | None) -> ShardTable:
    shards = manifest.shards
    if isinstance(shards, ShardColumns):
        lengths = shards.lengths()
        if len(set(lengths.values())) != 1:
            raise _contradicts(store.url, f"shard columns of different lengths {lengths}")
        return shards.table()
    names = NumberedNames(shards.names.prefix, shards.names.digits, shards.count)
    try:
        data = mapped_object(store, TABLE_KEY, shards.bytes, shards.digest, node_folder)
        return decode_table(data, names)
    except ObjectMissing:
        raise OutsideError(f"{store.url}/{TABLE_KEY} is damaged: it is missing") from None
    except MalformedTable as error:
        raise _contradicts(store.url, f"a table that is none: {error}") from error


def _contradicts(url: str, problem: str) -> PhalanxError:
    return PhalanxError(
        f"{url}/{MANIFEST_KEY}", expected=f"a manifest that agrees with itself, found {problem}", remedy=_REMEDY
    )


def _split_of(url: str, digest: str, manifest: ManifestFile, table: ShardTable) -> Split:
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
        columns=table,
    )


def _no_manifest(store: ObjectStore) -> PhalanxError:
    remedy = "make one with `phalanx data prepare INPUT --out URL`"
    below = [folder for folder in _folders(store) if _is_split(store, folder)]
    if below:
        remedy = f"name one of the split folders below it: {', '.join(below)}"
    return PhalanxError(store.url, expected=f"a split folder that holds {MANIFEST_KEY}", remedy=remedy)


def _folders(store: ObjectStore) -> list[str]:
    """The first folders right below the store's root, without a look at what lies in them."""
    names = (key.rstrip("/") for key in store.children() if key.endswith("/"))
    return list(itertools.islice(names, _MAX_FOLDERS_LOOKED_AT))


def _is_split(store: ObjectStore, folder: str) -> bool:
    try:
        store.info(f"{folder}/{MANIFEST_KEY}")
    except ObjectMissing:
        return False
    return True
