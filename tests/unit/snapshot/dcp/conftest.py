"""Tests of the door share the tensors and tilings of the folder above; each begins as a program that just started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def just_started() -> Iterator[None]:
    """A program that has not loaded or saved yet, and that leaves no save in flight."""
    from dcp_kit import start_again

    start_again()
    yield
    start_again()
