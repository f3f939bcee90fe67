"""What an import reads: tensors by the names that the source gives them, and where each one's bytes lie. Every kind of
source comes down to this; reading it needs ranged reads and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from phalanx.core.box import Box, whole
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectMissing, ObjectStore, StoreError
from phalanx.snapshot.coverage import coverage_fault
from phalanx.snapshot.dtypes import DTYPES, Dtype

PIECE_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A box of a tensor: its elements, row-major and little endian, from byte `start` of object `key` on.

    archive_bytes: where given, a zip archive of that length begins there instead, and the elements are somewhere in it.
    """

    box: Box
    key: str
    start: int
    archive_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source; its boxes tile it exactly once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SourceBox, ...]

    @property
    def kind(self) -> Dtype:
        """The element type."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Source:
    """A source as its headers describe it; no tensor is read yet.

    kind: `hugging-face` or `torch-dcp`. others: names of what is there beside tensors. config: content of its
    config.json, where it has one. numbers: counters that are stored as Python numbers, by name. digest: of all that
    tells it from another: headers, names and sizes of files.
    """

    kind: str
    url: str
    store: ObjectStore
    tensors: Mapping[str, SourceTensor]
    digest: str
    others: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = field(default=None)
    numbers: Mapping[str, float] = field(default_factory=dict)


def checked(tensor: SourceTensor, url: str) -> SourceTensor:
    """The tensor itself. Raises PhalanxError where its boxes don't tile it."""
    fault = coverage_fault(tensor.shape, [each.box for each in tensor.boxes])
    if fault is not None:
        raise unusable(f"tensor {tensor.name} of {url}", fault, "boxes that cover it exactly once")
    return tensor


def unusable(where: str, value: object, expected: str) -> PhalanxError:
    """What to raise for a source that says something impossible."""
    return PhalanxError(where, value=value, expected=expected, remedy="it is damaged or incomplete: copy it again")


def read_bytes(store: ObjectStore, key: str, offset: int = 0, length: int | None = None) -> bytes:
    """Bytes of the source; PhalanxError where the object is not there or shorter."""
    try:
        return store.read(key, offset, length)
    except ObjectMissing as error:
        raise unusable(f"{store.url}/{key}", None, "a file that is there, since the source names it") from error
    except StoreError as error:
        if "were asked of an object" in str(error):
            raise unusable(f"{store.url}/{key}", str(error), "a file as long as the source says") from error
        raise


def read_rows(store: ObjectStore, tensor: SourceTensor, rows: range) -> np.ndarray:
    """Rows of a tensor (its elements where it has one dimension, all of it where none), in the numpy type that has its
    bytes.
    """
    if not tensor.shape:
        return _read(store, tensor, tensor.boxes[0], 0, 1).reshape(())
    wanted = Box((rows.start, *(0 for _ in tensor.shape[1:])), (len(rows), *tensor.shape[1:]))
    found = np.empty(wanted.shape, tensor.kind.storage)
    for each in tensor.boxes:
        common = wanted.intersect(each.box)
        if common is None:
            continue
        row_elements = each.box.num_elements // each.box.shape[0]
        first = common.offset[0] - each.box.offset[0]
        values = _read(store, tensor, each, first * row_elements, common.shape[0] * row_elements)
        found[wanted.slices_of(common)] = values.reshape(common.shape)
    return found


def row_ranges(tensor: SourceTensor, multiple_of: int = 1) -> Iterator[range]:
    """All rows in ranges of about `PIECE_BYTES` and a multiple of `multiple_of` rows."""
    if not tensor.shape:
        yield range(1)
        return
    row_bytes = whole(tensor.shape).num_elements // max(1, tensor.shape[0]) * tensor.kind.itemsize
    step = max(1, PIECE_BYTES // max(1, row_bytes * multiple_of)) * multiple_of
    for first in range(0, tensor.shape[0], step):
        yield range(first, min(first + step, tensor.shape[0]))


def _read(store: ObjectStore, tensor: SourceTensor, box: SourceBox, first: int, count: int) -> np.ndarray:
    itemsize = tensor.kind.itemsize
    data = read_bytes(store, box.key, box.start + first * itemsize, count * itemsize)
    return np.frombuffer(data, tensor.kind.storage)
