"""The last few values that were needed, each made once however many threads ask for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """At most `capacity` values by key; the one least recently used goes first. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._lock = capacity, threading.Lock()
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()
        self._making: dict[Hashable, Future[Value]] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`, made by `make` where it is not kept. What `make` raises goes to all who wait for it, and
        is not kept; other keys don't wait.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            waited = self._making.get(key)
            if waited is None:
                making = self._making[key] = Future()
        if waited is not None:
            return waited.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            making.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._kept[key] = value
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        making.set_result(value)
        return value
