"""Orders that reach a rank, by a signal or by a stream, and wait there for the next step boundary."""

from __future__ import annotations

import signal
from types import FrameType

from phalanx.trainer.control import Orders

ORDER_SIGNALS = {signal.SIGINT: Orders.STOP, signal.SIGTERM: Orders.STOP, signal.SIGUSR1: Orders.CHECKPOINT}


class OrderBox:
    """Orders of one giver (the signals of this process, or one thread) for one taker, without a lock: what the giver
    writes nobody else does, so that `give` is safe in a signal handler.
    """

    def __init__(self) -> None:
        self._is_stopped = False
        self._num_checkpoint_orders = self._num_checkpoints_taken = 0

    def give(self, order: Orders) -> None:
        """Adds an order."""
        if Orders.STOP in order:
            self._is_stopped = True
        if Orders.CHECKPOINT in order:
            self._num_checkpoint_orders += 1

    def take(self) -> Orders:
        """What was given since the last call. STOP stays: a rank that was told to stop goes on saying so."""
        taken, self._num_checkpoints_taken = self._num_checkpoints_taken, self._num_checkpoint_orders
        checkpoint = Orders.CHECKPOINT if self._num_checkpoints_taken > taken else Orders.NONE
        return checkpoint | (Orders.STOP if self._is_stopped else Orders.NONE)

    def listen(self) -> None:
        """Takes the signals SIGINT and SIGTERM (stop) and SIGUSR1 (checkpoint now) of this process from now on; call in
        the main thread.
        """
        for number in ORDER_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.give(ORDER_SIGNALS[signal.Signals(number)])
