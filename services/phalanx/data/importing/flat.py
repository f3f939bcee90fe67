"""Flat files: `.npy` of one or two axes, and raw memmaps whose type the user names."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from tokenize import TokenError
from typing import ClassVar

import numpy as np

from phalanx.data.importing.errors import BadTokens, malformed
from phalanx.data.importing.files import Files
from phalanx.data.importing.rows import BLOCK_TOKENS, Rows
from phalanx.data.prepare.inputs.pieces import PIECE_BYTES

_MAX_NPY_HEADER = 1 << 16


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The tokens [first, stop) of a file, whole rows where it has rows. row_tokens: of each row (0: it has none)."""

    kind: ClassVar[str] = "flat"
    path: str
    num_bytes: int
    stream: int
    file_bytes: int
    data_offset: int
    dtype: str
    row_tokens: int
    first: int
    stop: int

    def rows(self, files: Files, *, is_head: bool) -> Iterator[Rows]:
        """All rows, in order; a file without rows is a single one, in blocks that go on where the last one ended.

        is_head: in small blocks.
        """
        source, item, width = files.open(self.path, self.file_bytes), np.dtype(self.dtype).itemsize, self.row_tokens
        block = BLOCK_TOKENS // 64 if is_head else BLOCK_TOKENS
        block = max(1, block // width) * width if width else block
        for start in range(self.first, self.stop, block):
            stop = min(start + block, self.stop)
            data = source.range(self.data_offset + start * item, self.data_offset + stop * item)
            tokens = np.frombuffer(data, self.dtype)
            if width:
                yield Rows(self.path, start // width, tokens, np.full(len(tokens) // width, width), len(data))
            else:
                yield Rows(self.path, 0, tokens, np.array([len(tokens)]), len(data), offset=start)


def npy_pieces(files: Files, path: str, stream: int, *, has_rows: bool) -> list[FlatPiece]:
    """The pieces of a .npy file. has_rows: a single axis is one row, not a stream of tokens.

    Raises BadTokens for a file that is none, is cut, or holds anything but integers in one or two axes.
    """
    where, num_bytes = files.shown(path), files.existing_size(path)
    stream_of_head = io.BytesIO(files.open(path, num_bytes).range(0, min(num_bytes, _MAX_NPY_HEADER)))
    try:
        version = np.lib.format.read_magic(stream_of_head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream_of_head)
    except (ValueError, SyntaxError, TokenError) as error:  # its header is a piece of Python
        raise malformed(where, "a .npy file", f"its header is none ({error})") from error
    if dtype.kind not in "iu":
        raise BadTokens(where, value=str(dtype), expected="ids of an integer type", remedy="import ids, not numbers")
    if len(shape) not in (1, 2) or (is_fortran and len(shape) == 2):
        found = "them in Fortran order" if len(shape) == 2 else f"{len(shape)} axes"
        raise BadTokens(
            where,
            value=shape,
            expected="ids in one axis, or rows of ids in C order",
            remedy=f"it has {found}: save it anew",
        )
    offset, num_tokens = stream_of_head.tell(), int(np.prod(shape, dtype=np.int64))
    expected = offset + num_tokens * dtype.itemsize
    if num_bytes != expected:
        raise malformed(where, f"{expected} bytes for its shape {shape}", f"it has {num_bytes}")
    width = shape[1] if len(shape) == 2 else (num_tokens if has_rows else 0)
    return _pieces(path, stream, num_bytes, offset, dtype.str, width, num_tokens)


def raw_pieces(files: Files, path: str, stream: int, dtype: str, skip_bytes: int) -> list[FlatPiece]:
    """The pieces of a file of nothing but ids behind `skip_bytes` of header; raises BadTokens for a size that no number
    of ids has.
    """
    where, num_bytes = files.shown(path), files.existing_size(path)
    num_tokens, rest = divmod(num_bytes - skip_bytes, np.dtype(dtype).itemsize)
    if rest or num_tokens < 0:
        raise malformed(where, f"ids of type {np.dtype(dtype).name} behind {skip_bytes} bytes", f"it has {num_bytes}")
    return _pieces(path, stream, num_bytes, skip_bytes, dtype, 0, num_tokens)


def _pieces(
    path: str, stream: int, file_bytes: int, data_offset: int, dtype: str, row_tokens: int, num_tokens: int
) -> list[FlatPiece]:
    item = np.dtype(dtype).itemsize
    at_once = PIECE_BYTES // item
    if row_tokens:
        at_once = max(1, at_once // row_tokens) * row_tokens
    return [
        FlatPiece(
            path=path,
            num_bytes=(min(start + at_once, num_tokens) - start) * item,
            stream=stream,
            file_bytes=file_bytes,
            data_offset=data_offset,
            dtype=dtype,
            row_tokens=row_tokens,
            first=start,
            stop=min(start + at_once, num_tokens),
        )
        for start in range(0, num_tokens, at_once)
    ]
