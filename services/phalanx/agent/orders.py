"""Orders that train repeats are carried out once and answered every time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
MOST_KEPT = 1000


class OrderBook(Generic[Answer]):
    """What was ordered by id, and how it was answered. Safe from any thread.

    send: gives an answer to train, or to nobody while no stream is open: train asks again.
    """

    def __init__(self, send: Callable[[Answer], None], most_kept: int = MOST_KEPT) -> None:
        self._send, self._most_kept = send, most_kept
        self._answers: OrderedDict[str, Answer | None] = OrderedDict()
        self._lock = threading.Lock()

    def is_new(self, order_id: str) -> bool:
        """Whether the order must be carried out now. One that was answered is answered again; one that is being
        carried out will be.
        """
        with self._lock:
            if order_id not in self._answers:
                self._answers[order_id] = None
                return True
            answer = self._answers[order_id]
        if answer is not None:
            self._send(answer)
        return False

    def answer(self, order_id: str, answer: Answer) -> None:
        """The order has been carried out, or never will be."""
        with self._lock:
            assert self._answers.get(order_id, answer) is None, f"order {order_id} is answered twice"
            self._answers[order_id] = answer
            self._forget_oldest()
        self._send(answer)

    def _forget_oldest(self) -> None:
        answered = [order_id for order_id, answer in self._answers.items() if answer is not None]
        for order_id in answered[: max(0, len(answered) - self._most_kept)]:
            del self._answers[order_id]
