"""The bytes of input files, on disks and in buckets; a file that is not what the listing saw is named.

Local files are compared with their listed size when they are opened, and with themselves when they have been read.
Small objects are fetched whole, several at a time; large ones by ranges, the next one while the last is worked on.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from typing import BinaryIO, cast

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.inputs.ahead import ahead
from phalanx.data.prepare.inputs.errors import ChangedInput
from phalanx.data.prepare.inputs.formats import Kind
from phalanx.data.prepare.inputs.objects import ForwardStream, InputObject, SeekingStream
from phalanx.data.prepare.inputs.pieces import Piece, Span
from phalanx.objects import ObjectStore, open_store

S3 = "s3://"
_BUFFER_BYTES = 2**20
_SMALL_OBJECTS_AHEAD = 16


def location_of(root: str, path: str) -> str:
    """The whole path or URL of a file below `root`; below an empty root lie whole paths and URLs."""
    return f"{root.rstrip('/')}/{path}" if root else path


def split_url(url: str) -> tuple[str, str]:
    """The URL of an s3:// URL's bucket, and the key or prefix in it."""
    bucket, _, key = url.removeprefix(S3).partition("/")
    return S3 + bucket, key


def opened(root: str, piece: Piece) -> Iterator[tuple[Span, BinaryIO]]:
    """Each span with a stream of its file, at the byte before the span or at 0; it can be sought in for parquet.

    Raises ChangedInput, PhalanxError where a file may not be read, OutsideError where reading fails.
    """
    stores: dict[str, ObjectStore] = {}
    for is_object, spans in groupby(piece.spans, lambda span: location_of(root, span.path).startswith(S3)):
        if is_object:
            yield from _objects([(span, _input_object(root, span, stores)) for span in spans])
        else:
            yield from _local_files(root, spans)


def _input_object(root: str, span: Span, stores: dict[str, ObjectStore]) -> InputObject:
    bucket, key = split_url(location_of(root, span.path))
    if bucket not in stores:
        stores[bucket] = open_store(bucket)
    return InputObject(stores[bucket], key, span.num_bytes)


def _objects(found: Sequence[tuple[Span, InputObject]]) -> Iterator[tuple[Span, BinaryIO]]:
    if len(found) == 1:
        span, source = found[0]
        yield from ((span, stream) for stream in _one_object(span, source))
        return
    with closing(ahead(lambda pair: pair[1].whole(), found, _SMALL_OBJECTS_AHEAD)) as contents:
        for (span, _), data in zip(found, contents, strict=True):
            yield span, io.BytesIO(data)


def _one_object(span: Span, source: InputObject) -> Iterator[BinaryIO]:
    kind = span.format.kind
    if kind is Kind.FILE:
        yield io.BytesIO(source.whole())
        return
    source.require_unchanged()
    if kind is Kind.PARQUET:
        yield cast(BinaryIO, SeekingStream(source))
    else:
        with closing(source.blocks(max(span.start - 1, 0), span.stop)) as blocks:
            yield io.BufferedReader(ForwardStream(blocks), _BUFFER_BYTES)
    source.require_unchanged()


def _local_files(root: str, spans: Iterable[Span]) -> Iterator[tuple[Span, BinaryIO]]:
    for span in spans:
        with _local_file(location_of(root, span.path), span.num_bytes) as stream:
            stream.seek(max(span.start - 1, 0))
            yield span, stream


@contextmanager
def _local_file(path: str, num_bytes: int) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffering=_BUFFER_BYTES) as stream:  # noqa: PTH123 - a path that is no Unicode stays itself
            before = os.fstat(stream.fileno())
            if before.st_size != num_bytes:
                raise ChangedInput.of_size(path, num_bytes, before.st_size)
            yield stream
            after = os.fstat(stream.fileno())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChangedInput(path, "but it is gone") from error
    except PermissionError as error:
        raise PhalanxError(path, expected="a file this user may read", remedy="change its permissions") from error
    except OSError as error:
        raise OutsideError(f"{path}: {error.strerror or error}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ChangedInput(path, "but it was written to while it was read")
