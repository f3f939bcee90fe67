"""A stream that outlives its connection: begun again behind the last item, so that none is missed and none repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from typing import Any, TypeVar

from phalanx.rpc.errors import Unavailable
from phalanx.rpc.retry import pause_s

Item = TypeVar("Item")


def follow(
    start: Callable[[int], Iterable[Item]],
    cursor_of: Callable[[Item], int],
    cursor: int = 0,
    *,
    give_up_s: float | None = None,
    stop: threading.Event | None = None,
    longest_pause_s: float = 5.0,
) -> Iterator[Item]:
    """The items behind `cursor`, each once and in order, through any number of broken connections.

    start(cursor): opens the stream of the items whose cursor is greater, in growing order (bookmarks count as items).
    The stream is opened again after `Unavailable` (a restart, a partition, its deadline), with growing pauses that
    start anew after each item. It ends when the server ends it, or when `stop` is set. Raises `Unavailable` after
    `give_up_s` without a connection that brought an item (None: never), and every other error at once.
    """
    failures, last_progress_s = 0, time.monotonic()
    while stop is None or not stop.is_set():
        try:
            stream = start(cursor)
            with _ending(stream):
                for item in stream:
                    at = cursor_of(item)
                    if at <= cursor:
                        continue
                    yield item
                    cursor, failures, last_progress_s = at, 0, time.monotonic()
                    if stop is not None and stop.is_set():
                        return
            return
        except Unavailable:
            pause = pause_s(failures, longest_s=longest_pause_s)
            failures += 1
            if give_up_s is not None and time.monotonic() + pause - last_progress_s > give_up_s:
                raise
            if stop is None:
                time.sleep(pause)
            else:
                stop.wait(pause)


def _ending(stream: Any) -> Any:
    """Ends the stream however the block is left: by its `cancel`, or its `close`."""
    if hasattr(stream, "cancel"):
        return _Cancelling(stream)
    return closing(stream) if hasattr(stream, "close") else nullcontext()


class _Cancelling:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._stream.cancel()
