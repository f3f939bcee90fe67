"""Philox against its authors' known answers, on ints, numpy and torch alike; permutations built on it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.philox import LARGEST_SORTED, key_of, permutation, philox4x32

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
FROZEN_MANY = "6ece1ea6573ab400cf98b627f11b2f43fd2653035b05d3c2a244f4c0bac955db"
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


@pytest.mark.parametrize("count", [LARGEST_SORTED, LARGEST_SORTED + 1, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 300_007])
def test_permutation_of_many_holds_each_index_once(count):
    assert (np.sort(permutation(count, key_of(count))) == np.arange(count)).all()


def test_permutation_of_many_is_frozen_since_runs_depend_on_it():
    digest = hashlib.sha256(permutation(100_000, key_of(7, "frozen")).astype("<i8").tobytes()).hexdigest()
    assert digest == FROZEN_MANY


@pytest.mark.parametrize("count", [LARGEST_SORTED, 100_000, 1 << 17])
def test_permutation_places_pairs_and_runs_are_as_random_ones(count):
    """Sorted or not: where an element comes to lie, how far neighbours move apart and how many keep their order can't
    be told from a random permutation, over 40 keys. Bounds: five standard deviations.
    """
    places, gaps, ascents = np.zeros((16, 16)), [], []
    for key in range(40):
        order = permutation(count, key_of(key, "statistics"))
        places += np.histogram2d(np.arange(count), order, 16)[0]
        gaps.append(np.abs(np.diff(order)).mean() / count)
        ascents.append((np.diff(order) > 0).mean())
    expected = 40 * count / 256
    chi_square = float((np.square(places - expected) / expected).sum())
    assert abs(chi_square - 225) < 5 * np.sqrt(2 * 225)
    deviation = np.sqrt(1 / 18 / count / 40)
    assert abs(np.mean(gaps) - 1 / 3) < 5 * 2 * deviation
    assert abs(np.mean(ascents) - 0.5) < 5 * np.sqrt(1 / 12 / count / 40)


@pytest.mark.parametrize("count", [100_000, 1 << 17])
def test_permutation_of_many_neighbouring_numbers_under_one_key_go_separate_ways(count):
    """Serial correlation at several lags, also those of the halves of the network."""
    order = permutation(count, key_of("serial")).astype(float)
    centred = order - order.mean()
    for lag in (1, 2, 255, 256, 257, 512, 1024):
        correlation = float((centred[lag:] * centred[:-lag]).mean() / centred.var())
        assert abs(correlation) < 5 / np.sqrt(count), lag


def test_key_of_parts_that_join_alike_gives_other_keys():
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", "")}) == 4
