"""Inputs that cannot be imported as what they claim to be: mistakes a user can mend."""

from __future__ import annotations

import importlib.util

from phalanx.core.errors import PhalanxError


class BadTokens(PhalanxError):
    """A file of tokens that is not what it says, or not what was asked for; the message names the file."""


def malformed(where: str, expected: str, found: str) -> BadTokens:
    """The error for a file that is cut, of another version, or contradicts itself."""
    return BadTokens(
        where, expected=f"{expected}, {' '.join(found.split())}", remedy="copy the file again, or name another input"
    )


def require_pyarrow(where: str) -> None:
    """Raises PhalanxError where pyarrow, which reads this file, is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise PhalanxError(
            where, expected="pyarrow to be installed, which reads it", remedy="pip install 'phalanx[data]'"
        )
