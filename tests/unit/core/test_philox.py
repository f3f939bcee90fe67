"""Philox against its authors' known answers, on ints, numpy and torch alike; permutations built on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.philox import key_of, permutation, philox4x32

ONES = 0xFFFFFFFF
# Random123's kat_vectors for philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
FROZEN = [5, 3, 7, 9, 2, 6, 0, 8, 4, 1]
words = st.integers(0, ONES)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_counter_gives_the_authors_answer(counter, key, answer):
    assert philox4x32(counter, key) == answer


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_any_counter_is_the_same_for_ints_numpy_and_torch(counter, key):
    plain = philox4x32(counter, key)
    with np.errstate(over="ignore"):
        arrays = philox4x32(tuple(np.array([word]) for word in counter), key)
    tensors = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word[0]) for word in arrays) == plain
    assert tuple(int(word) for word in tensors) == plain


@given(st.integers(0, 2000), st.integers(0, 50))
def test_permutation_any_count_holds_each_index_once(count, seed):
    assert sorted(permutation(count, key_of(seed, "test")).tolist()) == list(range(count))


def test_permutation_other_keys_give_other_orders_and_the_same_key_the_same():
    one, other = (permutation(1000, key_of(0, epoch)) for epoch in (1, 2))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, permutation(1000, key_of(0, 1)))


def test_permutation_is_frozen_since_runs_depend_on_it():
    assert permutation(10, key_of(7, "frozen")).tolist() == FROZEN


def test_key_of_parts_that_join_alike_gives_other_keys():
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", "")}) == 4
