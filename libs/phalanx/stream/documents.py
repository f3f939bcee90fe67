"""A split as a sequence of documents, for notebooks and for a look at what is there: `phalanx.stream.open(url)[i]`.

    docs = phalanx.stream.open("s3://bucket/dataset/train")
    len(docs); docs[17].text; docs[-3:]; docs.by_id("handbook/intro.md")[0].tokens

Documents come in the order in which they are stored, not in that of a training run. Opening reads the manifest alone;
a document costs its shard's index, its member (1 MiB as a rule; checked by its digest) and, where they are asked for,
its shard's ids and the tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import numbered
from phalanx.objects import ObjectStore, StorageSettings, open_store
from phalanx.stream.ids import find_id, read_ids
from phalanx.stream.manifest import Split, has_manifest, open_split
from phalanx.stream.members import ShardIndices
from phalanx.stream.pieces import Piece, SplitPieces
from phalanx.stream.recent import Recent
from phalanx.stream.token_text import TokenText, find_tokenizer

Tokens: TypeAlias = NDArray[np.unsignedinteger]
MEMBER_BYTES = 1 << 20
_KEPT_PIECES, _KEPT_IDS = 8, 8


class Document:
    """One document. index: its number in the split; shard, number: its shard, and its number in that."""

    __slots__ = ("_documents", "index", "number", "shard")

    def __init__(self, documents: Documents, index: int, shard: int, number: int) -> None:
        self._documents, self.index, self.shard, self.number = documents, index, shard, number

    @property
    def id(self) -> str:
        """Its id; raises OutsideError where the ids of its shard are damaged."""
        return self._documents.ids_of(self.shard)[self.number]

    @property
    def tokens(self) -> Tokens:
        """Its tokens, uint16 or uint32 [length], read-only; the last is the end of text. Raises DamagedShard."""
        return self._documents.tokens_of(self.shard, self.number)

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, from the shard's index alone."""
        return int(self._documents.index_of(self.shard).lengths[self.number])

    @property
    def shard_name(self) -> str:
        """The name of its shard."""
        return self._documents.split.shard(self.shard).name

    @property
    def text(self) -> str | None:
        """What its tokens say, without special tokens; None where the tokenizer.json is not with the dataset."""
        return self.said(0, self.num_tokens)

    def said(self, start: int, stop: int) -> str | None:
        """What its tokens [start, stop) say; None as for `text`."""
        tokenizer = self._documents.tokenizer
        return None if tokenizer is None else tokenizer.decode(self.tokens[start:stop])

    def __repr__(self) -> str:
        return f"Document(id={self.id!r}, index={self.index}, num_tokens={self.num_tokens})"


class Documents(Sequence[Document]):
    """The documents of one split. split: its manifest. Not to be carried over a fork."""

    def __init__(self, store: ObjectStore, split: Split, settings: StorageSettings | None = None) -> None:
        self._store, self._settings, self.split = store, settings, split
        self._firsts = np.concatenate([[0], np.cumsum(split.shard_documents)])
        self.index_of = ShardIndices(store, split)
        self._pieces = SplitPieces(store, split, self.index_of, piece_bytes=MEMBER_BYTES)
        self._loaded = Recent[Piece](_KEPT_PIECES)
        self._ids = Recent[list[str]](_KEPT_IDS)

    @cached_property
    def tokenizer(self) -> TokenText | None:
        """The dataset's tokenizer, from the split's folder or the one above; None where it lies in neither. Raises
        OutsideError for one of another digest.
        """
        return find_tokenizer(self._store, self.split.tokenizer_digest, self._settings)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        """A document, or those of a slice as a sequence that reads them one by one; raises IndexError."""
        if isinstance(index, slice):
            return _Slice(self, range(len(self))[index])
        place = _at(range(len(self)), index, "documents")
        shard = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return Document(self, place, shard, place - int(self._firsts[shard]))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Documents({self.split.url!r}: {len(self):,} documents, {self.split.num_tokens:,} tokens)"

    def at(self, shard: int, number: int) -> Document:
        """A document by its shard and its number in it; raises IndexError."""
        shard = _at(range(self.split.num_shards), shard, "shards")
        number = _at(range(int(self.split.shard_documents[shard])), number, "documents in the shard")
        return Document(self, int(self._firsts[shard]) + number, shard, number)

    def by_id(self, document_id: str) -> tuple[Document, ...]:
        """All documents of an id, as ids may repeat; none where there is none. Reads the ids of all shards."""
        return tuple(self.at(*place) for place in find_id(self._store, self.split, document_id))

    def ids_of(self, shard: int) -> Sequence[str]:
        """The ids of a shard's documents; raises OutsideError where they are damaged."""
        return self._ids.get(shard, lambda: read_ids(self._store, self.split, shard))

    def tokens_of(self, shard: int, number: int) -> Tokens:
        """See `Document.tokens`."""
        member, start = self.place_of(shard, number)
        cut = self._pieces.cut(shard)
        number_of_piece = int(cut.piece_of[member])
        piece = self._loaded.get((shard, number_of_piece), lambda: self._pieces.load(shard, number_of_piece))
        piece.require([member])
        begin = int(cut.within[member]) + start * self._pieces.dtype.itemsize
        return np.frombuffer(piece.data, self._pieces.dtype, int(self.index_of(shard).lengths[number]), begin)

    def place_of(self, shard: int, number: int) -> tuple[int, int]:
        """The member that holds a document, and where in it the document begins, in tokens."""
        index = self.index_of(shard)
        firsts = index.member_first_documents()
        member = int(np.searchsorted(firsts, number, side="right")) - 1
        return member, int(index.lengths[firsts[member] : number].sum(dtype=np.int64))


class _Slice(Sequence[Document]):
    """Some documents of a split, read when they are asked for."""

    def __init__(self, documents: Documents, places: range) -> None:
        self._documents, self._places = documents, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return _Slice(self._documents, self._places[index])
        return self._documents[_at(self._places, index, "documents")]

    def __repr__(self) -> str:
        return repr(list(self))


def open_documents(
    url: str | os.PathLike[str], split: str | None = None, settings: StorageSettings | None = None
) -> Documents:
    """The documents of a split, by the URL of its folder or of the dataset above it: `file://...` or `s3://...`; or by
    the path of a folder on this machine, as a `Path`.

    split: which one of a dataset, `train` where none is named. settings: how the bucket is reached, else as the usual
    AWS variables and files say. Raises PhalanxError for what is neither, and where there is no such split, or its
    manifest is broken.
    """
    store = open_store(_url_of(url), settings)
    if split is not None:
        store = store.within(split)
    elif not has_manifest(store) and has_manifest(store.within("train")):
        store = store.within("train")
    return Documents(store, open_split(store), settings)


def _url_of(given: object) -> str:
    if isinstance(given, str):
        return given
    path = os.fspath(given) if isinstance(given, os.PathLike) else None
    if isinstance(path, str):
        return f"file://{Path(path).resolve()}"
    raise PhalanxError(
        "phalanx.stream.open",
        value=repr(given)[:64],
        expected="the URL of a dataset or split (file://..., s3://...), or a Path",
        remedy="write phalanx.stream.open('file:///data/books/train')",
    )


def _at(places: range, index: int, what: str) -> int:
    try:
        return places[index]
    except IndexError:
        raise IndexError(f"index {index} is out of range: there are {len(places):,} {what}") from None


def document_numbered(documents: Documents, shard: str, number: int | None = None) -> Document:
    """A document by the name or number of its shard, and its number there (the first where None is given); raises
    PhalanxError for what is not there.
    """
    split = documents.split
    found = numbered(shard) if shard.isdecimal() else split.number_of(shard)
    if found is None or found >= split.num_shards:
        raise PhalanxError(
            "--shard",
            value=shard,
            expected=f"a shard of {split.url}: its name, or a number below {split.num_shards}",
            remedy=f"the first is {split.shard(0).name}",
        )
    count = int(split.shard_documents[found])
    if number is not None and not 0 <= number < count:
        raise PhalanxError(
            "--document",
            value=number,
            expected=f"a number from 0 to {count - 1}: {split.shard(found).name} has {count} documents",
            remedy="leave out --shard to name a document by its id",
        )
    return documents.at(found, number or 0)
