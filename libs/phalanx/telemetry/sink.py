"""What a sink is: a place where a run's figures go, which may be slow, broken or absent without harming the run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from phalanx.core.errors import PhalanxError

Values = Mapping[str, float]


class Sink(Protocol):
    """One destination. All calls but the constructor come from one thread of its own; what they raise is counted, never
    passed on.

    name: for messages.
    """

    name: str

    def open(self, run_id: str, config: Mapping[str, Any]) -> int:
        """Begin or continue run `run_id`; the highest step that it already has, -1 for none. Steps up to it are not
        given again.
        """
        ...

    def log(self, step: int, values: Values) -> None:
        """One row of figures; steps ascend."""
        ...

    def flush(self) -> None:
        """Bring what was logged to where a reader sees it."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


@runtime_checkable
class Returning(Protocol):
    """A sink whose other end may be away for long and come back: it is never turned off. A row that it does not take
    is tried again after a pause, until it does; meanwhile rows wait, and those for which there is no room are dropped.

    longest_pause_s: pauses grow up to it.
    """

    longest_pause_s: float


def require(module: str, *, key: str, extra: str) -> None:
    """Raise PhalanxError, naming the extra to install, when a sink's library is missing; imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise PhalanxError(
            key,
            value=True,
            expected=f"the library {module}",
            remedy=f"install phalanx[{extra}], or set {key} to false",
        )
