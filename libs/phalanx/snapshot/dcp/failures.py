"""What went wrong inside torch's planning, as an error of its own kind.

torch collects the failures of all ranks in a CheckpointException, which derives from BaseException: `except Exception`
does not see it, and a program that logs and goes on would die of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from phalanx.core.errors import OutsideError, PhalanxError


@contextmanager
def told_plainly() -> Iterator[None]:
    """Raises, instead of a CheckpointException, what the first rank failed with: a PhalanxError or an OutsideError as
    it is, anything else as an OutsideError with its text. The CheckpointException is the cause.
    """
    try:
        yield
    except CheckpointException as error:
        cause = cause_of(error)
        rank, *others = sorted(error.failures)
        cause.add_note(f"on rank {rank}" + (f", and {len(others)} more: {others[:8]}" if others else ""))
        raise cause from error


def cause_of(error: BaseException) -> BaseException:
    """What the first rank failed with, of a CheckpointException; any other error as it is."""
    if not isinstance(error, CheckpointException):
        return error
    _, (cause, _) = min(error.failures.items())
    if not isinstance(cause, PhalanxError | OutsideError) and isinstance(cause, Exception):
        cause = OutsideError(f"{error.args[0]}: {type(cause).__name__}: {cause}")
    return cause
