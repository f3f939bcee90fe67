"""Philox4x32-10, the counter-based generator behind every random choice of Phalanx (Salmon et al., SC 2011, "Parallel
random numbers: as easy as 1, 2, 3", section 3.3).

A value depends on (key, counter) alone, so whoever needs it computes it: no state is kept, saved or handed on, and no
layout, worker count or order of evaluation can change it. The arithmetic is written for any integer array with 64-bit
signed wrap-around (numpy and torch alike): products of two 32-bit words overflow into the sign, and a shift with a mask
recovers the right bits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10


def key_of(*parts: object) -> tuple[int, int]:
    """A 64-bit Philox key, as two 32-bit words, from any values with a stable `str` (a seed, a purpose, a tensor's
    name).
    """
    text = "\x1f".join(str(part) for part in parts).encode()
    word = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    return word & _MASK, word >> 32


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words (held in int64) for each counter, whose words are ints or int64 arrays that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK) ^ c1 ^ k0,
            product_1 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def permutation(count: int, key: tuple[int, int]) -> np.ndarray:
    """A permutation of range(count) as int64 [count]: ranks of 64-bit Philox values, ties (if any) by index."""
    index = np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        low, high, _, _ = philox4x32((index & _MASK, index >> 32, index * 0, index * 0), key)
    return np.argsort((high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64), kind="stable")
