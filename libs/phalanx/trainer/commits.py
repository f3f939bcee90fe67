"""Commits as the ranks hold them: rank 0 runs them in a thread, the others have nothing to wait for."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from phalanx.core.errors import OutsideError
from phalanx.lineage import Manifest


class Committed:
    """What ranks other than 0 hold."""

    done = True

    def wait(self, deadline_s: float) -> None:
        """Returns at once."""


class Committing:
    """A commit that rank 0 runs in a thread. least_s: how long `wait` waits at least, whatever the caller would."""

    def __init__(self, future: Future[None], manifest: Manifest, *, least_s: float = 0.0) -> None:
        self._future, self._manifest, self._least_s = future, manifest, least_s

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, deadline_s: float) -> None:
        """Raises what the commit raised, or OutsideError past the deadline."""
        longest_s = max(deadline_s, self._least_s)
        try:
            self._future.result(timeout=longest_s)
        except FutureTimeout as error:
            raise OutsideError(f"checkpoint {self._manifest.ref} was not committed within {longest_s:g} s") from error
