"""The element types a checkpoint can hold, under the names torch and numpy use and under the codes of the safetensors
format.

numpy has no bfloat16: its bytes are handled as uint16 and `to_float32` widens them (exact, every bfloat16 is a
float32).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: its name (torch's, without the `torch.`), safetensors code, and the numpy type that has its
    bytes.
    """

    name: str
    code: str
    storage: np.dtype[np.generic]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.storage.itemsize


_ROWS = (
    ("float64", "F64", "<f8"),
    ("float32", "F32", "<f4"),
    ("bfloat16", "BF16", "<u2"),
    ("float16", "F16", "<f2"),
    ("int64", "I64", "<i8"),
    ("int32", "I32", "<i4"),
    ("int16", "I16", "<i2"),
    ("int8", "I8", "|i1"),
    ("uint8", "U8", "|u1"),
    ("bool", "BOOL", "|b1"),
)
DTYPES = {name: Dtype(name, code, np.dtype(storage)) for name, code, storage in _ROWS}


def bfloat16_to_float32(raw: np.ndarray) -> np.ndarray:
    """Widens bfloat16 bytes (uint16, any shape) to float32 of the same shape; exact."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds float32 (any shape) to bfloat16 bytes (uint16), to nearest even as IEEE 754 does; a NaN stays a (quiet)
    NaN.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
