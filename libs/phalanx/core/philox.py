"""Philox4x32-10, the counter-based generator behind every random choice of Phalanx (Salmon et al., SC 2011, "Parallel
random numbers: as easy as 1, 2, 3", section 3.3).

A value depends on (key, counter) alone, so whoever needs it computes it: no state is kept, saved or handed on, and no
layout, worker count or order of evaluation can change it. The arithmetic is written for any integer array with 64-bit
signed wrap-around (numpy and torch alike): products of two 32-bit words overflow into the sign, and a shift with a mask
recovers the right bits.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10
LARGEST_SORTED = 1 << 16
FEISTEL_ROUNDS = 6
_CHUNK = 1 << 14  # so small that the arrays of one stay in a core's cache


_Integer = TypeVar("_Integer", bound=np.integer)


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


@overload
def permutation(count: int, key: tuple[int, int]) -> NDArray[np.int64]: ...
@overload
def permutation(count: int, key: tuple[int, int], dtype: type[_Integer]) -> NDArray[_Integer]: ...
def permutation(count: int, key: tuple[int, int], dtype: type[np.integer] = np.int64) -> NDArray[np.integer]:
    """A permutation of range(count), [count] in a type that holds these numbers.

    Up to 2^16 it is the ranks of 64-bit Philox values, ties (if any) by index; above, where sorting would take longest,
    a Feistel network (`_feistel`): 10 to 20 ns of one core for each element of the next power of two.
    """
    if count > LARGEST_SORTED:
        return _feistel(count, key, dtype)
    index = np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        low, high, _, _ = philox4x32((index, 0, 0, 0), key)
    values = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    return np.argsort(values, kind="stable").astype(dtype, copy=False)


def _feistel(count: int, key: tuple[int, int], dtype: type[_Integer]) -> NDArray[_Integer]:
    """A Feistel network on the numbers below the next power of two, of whose results those below `count` are kept.

    Each round's function is a table of Philox values, so it is as random as they are; with random round functions six
    rounds can't be told from a random permutation in a feasible number of looks (Luby and Rackoff, 1988; Patarin,
    "Security of balanced and unbalanced Feistel schemes with linear non equalities", 2010). Keeping the results in
    range leaves a permutation (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """
    bits = (count - 1).bit_length()
    right_bits = bits // 2
    tables = _round_tables(bits - right_bits, right_bits, key)
    found, num_found = np.empty(count, dtype), 0
    offsets = np.arange(_CHUNK, dtype=np.int64)
    left, right, added = np.empty((3, _CHUNK), np.int64)  # reused, since fresh memory costs more than the arithmetic
    for first in range(0, 1 << bits, _CHUNK):
        np.add(offsets, first, out=added)
        np.right_shift(added, right_bits, out=left)
        np.bitwise_and(added, (1 << right_bits) - 1, out=right)
        for to_left, to_right in tables:
            left ^= to_left.take(right, out=added, mode="clip")  # clip: none is out of bounds, and raise makes a copy
            right ^= to_right.take(left, out=added, mode="clip")
        left <<= right_bits
        left |= right
        result = left if count == 1 << bits else left[left < count]
        found[num_found : num_found + len(result)] = result
        num_found += len(result)
    assert num_found == count
    return found


def _round_tables(
    left_bits: int, right_bits: int, key: tuple[int, int]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each pair of rounds: what is added to the left half by the value of the right one, and the other way."""
    size = 1 << left_bits
    with np.errstate(over="ignore"):
        words = philox4x32((np.arange(FEISTEL_ROUNDS * size, dtype=np.int64), 0, 0, 0), key)[0]
    rounds = words.reshape(FEISTEL_ROUNDS // 2, 2, size)
    return [
        (to_left[: 1 << right_bits] & (size - 1), to_right & ((1 << right_bits) - 1)) for to_left, to_right in rounds
    ]
