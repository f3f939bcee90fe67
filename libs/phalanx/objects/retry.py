"""Deadlines and retries: how long one call may take in all, and when it tries again."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from phalanx.objects.base import StoreError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
SLOWEST_BYTES_PER_S = 8 * 2**20
Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)


class TransientError(Exception):
    """One try failed in a way that another may not; whether the server acted on it is unknown."""


class StaleCredentialsError(TransientError):
    """The server calls our credentials expired: other ones may come."""


class DeadlineError(StoreError):
    """The deadline came before an answer that counts; whether the server acted is unknown."""


class Deadline:
    """A point on this process's monotonic clock; bulk bytes move it by what they need at SLOWEST_BYTES_PER_S.

    One call to a store makes one and passes it down to everything that it does, so that the whole call ends by it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end_s = time.monotonic() + seconds

    def allow(self, num_bytes: int) -> None:
        """Adds the time that `num_bytes` may take."""
        self._end_s += num_bytes / SLOWEST_BYTES_PER_S

    def restart(self) -> None:
        """Begins anew, after progress."""
        self._end_s = time.monotonic() + self._seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(self._end_s - time.monotonic(), 0.0)


def retry(what: object, deadline: Deadline, operation: Callable[[int], Result]) -> Result:
    """The result of `operation(number of the try, from 0)`, tried again after TransientError until the deadline.

    Pauses grow twofold with full jitter. The first failure is logged, level INFO. Raises DeadlineError, which names
    `what` as it reads then, the number of tries and the last cause, which is chained; other exceptions pass through at
    once.
    """
    number = 0
    while True:
        try:
            return operation(number)
        except TransientError as error:
            pause_s = random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number))
            number += 1
            if deadline.remaining_s <= pause_s:
                raise DeadlineError(f"{what}: still failing after {number} tries at the deadline: {error}") from error
            if number == 1:
                left_s = deadline.remaining_s
                _LOG.info("%s: the first try failed, others follow for up to %.0f s: %s", what, left_s, error)
            time.sleep(pause_s)


def in_background(act: Callable[[], Result]) -> Future[Result]:
    """Begins `act()` in a thread of its own; the process waits for it before it ends."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="phalanx-request")
    future = threads.submit(act)
    threads.shutdown(wait=False)
    return future


def by_deadline(deadline: Deadline, act: Callable[[], Result]) -> Result:
    """`act()`, waited for until the deadline, for clients whose own time-outs bound a silence but not a whole request.

    Raises TransientError past the deadline; `act` then goes on in the background until its own time-outs end it.
    """
    return result_by(deadline, in_background(act))


def result_by(deadline: Deadline, future: Future[Result]) -> Result:
    """The future's result; TransientError if there is none by the deadline."""
    try:
        return future.result(deadline.remaining_s)
    except TimeoutError as error:
        raise TransientError("no answer by the deadline") from error
