"""The bytes of an imported tensor, a piece at a time: fp32, and the rows of heads in Phalanx's order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from phalanx.checkpoint.importing.mapping import MappedTensor
from phalanx.checkpoint.importing.source import PIECE_BYTES, read_rows, row_ranges
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectStore
from phalanx.snapshot.dtypes import bfloat16_to_float32

DTYPE: Final = "float32"  # in which a rank keeps its weights and moments
READ_AHEAD: Final = 4
_ITEM_BYTES: Final = 4

Given = TypeVar("Given")
Found = TypeVar("Found")


def num_bytes(tensor: MappedTensor) -> int:
    """Bytes of its values in the checkpoint."""
    return math.prod(tensor.shape) * _ITEM_BYTES


def pieces(store: ObjectStore, tensor: MappedTensor, pool: ThreadPoolExecutor) -> Iterator[memoryview]:
    """The tensor's bytes in the checkpoint, row-major. `READ_AHEAD` pieces are being read while one is used."""
    source = tensor.source
    if source is None:
        zeros = memoryview(bytes(min(PIECE_BYTES, num_bytes(tensor))))
        for start in range(0, num_bytes(tensor), PIECE_BYTES):
            yield zeros[: num_bytes(tensor) - start]
        return

    def read(rows: range) -> memoryview:
        assert source is not None
        values = finite(widened(read_rows(store, source, rows), source.dtype), source.name, rows)
        return _bytes(values if tensor.head_dim is None else to_halves(values, tensor.head_dim))

    yield from _ahead(pool, read, row_ranges(source, tensor.head_dim or 1))


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values of a float type of at most 32 bits as fp32; exact."""
    return bfloat16_to_float32(values) if dtype == "bfloat16" else values.astype(np.float32, copy=False)


def finite(values: np.ndarray, name: str, rows: range) -> np.ndarray:
    """`values` themselves. Raises PhalanxError where one is NaN or infinite: no job could begin with it."""
    if np.isfinite(values).all():
        return values
    raise PhalanxError(
        name,
        value=f"{np.count_nonzero(~np.isfinite(values))} values that are NaN or infinite, in rows {rows.start} to "
        f"{rows.stop - 1}",
        expected="finite numbers, since a job that begins with others learns nothing",
        remedy="import an earlier checkpoint of the source",
    )


def to_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [H * head_dim, ...] of a projection whose rotary pairs are rows 2i and 2i + 1 of a head, in the order in
    which they are rows i and i + head_dim / 2: the same function (arXiv 2104.09864; transformers' Llama conversion).
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _ahead(pool: ThreadPoolExecutor, work: Callable[[Given], Found], items: Iterable[Given]) -> Iterator[Found]:
    """`work` of each item, in their order, with a few of them in progress."""
    waiting: deque[Future[Found]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > READ_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for each in waiting:
            each.cancel()
