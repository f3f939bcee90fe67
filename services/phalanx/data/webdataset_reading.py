"""Reads a split through the plain `webdataset` library, by the tar alone: the independent side of the proof that
nothing was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PhalanxError
from phalanx.objects import StorageSettings, fsspec_options
from phalanx.stream.manifest import Split, tar_key

_OF_URLS: Final = frozenset("?#")  # webdataset's opener takes a path with one of these for a URL with a query


@dataclass(frozen=True, slots=True, eq=False)
class PlainMember:
    """One WebDataset sample: tokens [n] as stored; bounds uint32, the end of each document."""

    shard: str
    member: int
    tokens: NDArray[np.unsignedinteger]
    bounds: NDArray[np.uint32]


def read_with_webdataset(
    split_url: str, split: Split, settings: StorageSettings | None = None
) -> Iterator[PlainMember]:
    """Every member of a split, in the manifest's order. split_url: the split folder as `file://...`, a plain path, or
    `s3://...`.

    Raises PhalanxError where `webdataset` is not installed, and what that library raises for a tar that it cannot read.
    """
    webdataset = _library()
    for name in split.columns.names:
        samples = _samples(webdataset, f"{split_url.rstrip('/')}/{tar_key(name)}", settings)
        for sample in samples:
            member = int(sample["__key__"].rpartition("-")[2])
            yield PlainMember(name, member, sample["tokens.npy"], sample["bounds.npy"])


def _samples(webdataset: Any, url: str, settings: StorageSettings | None) -> Iterator[Mapping[str, Any]]:
    """Decoded samples of one tar: local files by webdataset's own opener, others as a stream."""
    path = url.removeprefix("file://")
    if "://" not in path and _OF_URLS.isdisjoint(path):
        yield from webdataset.WebDataset([path], shardshuffle=False).decode()
        return
    with _opened(path, settings) as stream:
        files = webdataset.tariterators.tar_file_expander([{"url": url, "stream": stream}])
        decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
        for sample in webdataset.tariterators.group_by_keys(files):
            yield decode(sample)


def _opened(path: str, settings: StorageSettings | None) -> AbstractContextManager[IO[bytes]]:
    if "://" not in path:
        return Path(path).open("rb")
    import fsspec

    opened: AbstractContextManager[IO[bytes]] = fsspec.open(path, "rb", **fsspec_options(path, settings))
    return opened


def read_shard_with_webdataset(
    split_url: str, shard_name: str, settings: StorageSettings | None = None
) -> Iterator[NDArray[np.unsignedinteger]]:
    """The tokens of each member of one shard, in order; parameters and errors as for `read_with_webdataset`."""
    for sample in _samples(_library(), f"{split_url.rstrip('/')}/{tar_key(shard_name)}", settings):
        yield sample["tokens.npy"]


def _library() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise PhalanxError("webdataset", expected="the package", remedy="pip install 'phalanx[data]'") from error
    return webdataset
