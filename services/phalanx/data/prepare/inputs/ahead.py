"""Fetching ahead: the next results are under way while the last one is worked on, a bounded number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(fetch: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Generator[Result]:
    """`fetch(item)` for each item, in order, with up to `depth` of them under way in threads.

    Raises what a fetch raised, at its place. Ending early waits for those under way.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(depth, thread_name_prefix="phalanx-input") as threads:
        try:
            for item in items:
                waiting.append(threads.submit(fetch, item))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
