"""Numbers of attempts, steps and versions: what of them fits the keys of storage, where each has 8 digits so that keys
sort as numbers do.
"""

from __future__ import annotations

from typing import Final

MOST_DIGITS: Final = 8
LARGEST: Final = 10**MOST_DIGITS - 1


def numbered(text: str) -> int | None:
    """The number that `text` is, in up to 8 ASCII digits; None for any other text, so for a longer number too."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None
