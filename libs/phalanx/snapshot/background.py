"""Work in daemon threads: a process that ends does not wait for it, as it would for an executor's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)


def begin(act: Callable[[], Result], name: str) -> Future[Result]:
    """Begins `act()` in a thread called `name`; what comes of it, whatever it is, waits in the future."""
    future: Future[Result] = Future()
    threading.Thread(target=_settle, args=(future, act, name), name=name, daemon=True).start()
    return future


def each(act: Callable[[int], Result], count: int, num_threads: int, name: str) -> list[Result]:
    """`act` of 0 to `count` - 1, `num_threads` at once (where one will do, it is the caller's), in order. After a
    failure none is begun any more; it is raised when those begun have ended.
    """
    if min(num_threads, count) <= 1:
        return [act(number) for number in range(count)]
    results: dict[int, Result] = {}
    numbers = iter(range(count))
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = act(number)
            except BaseException:
                stop.set()
                raise

    failures = [future.exception() for future in [begin(work, name) for _ in range(min(num_threads, count))]]
    for failure in failures:
        if failure is not None:
            raise failure
    return [results[number] for number in range(count)]


def _settle(future: Future[Result], act: Callable[[], Result], name: str) -> None:
    try:
        future.set_result(act())
    except BaseException as error:  # noqa: BLE001  (whoever holds the future raises it)
        _LOG.info("%s failed: %s", name, error)
        future.set_exception(error)
