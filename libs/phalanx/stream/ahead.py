"""Has the blocks fetched that come next, while the one before them is read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.stream.order import Order
from phalanx.stream.segments import SegmentColumns

_LOG = logging.getLogger(__name__)


class BlockAhead:
    """For one order: as soon as a block is read from, all that is needed of it is asked for, and of the next one.

    A block mixes the documents of all its shards, so its first windows need pieces all over it. What fails here is met,
    and told, by whoever reads it. start: asks for what segments need, as far as a number of bytes reaches, and says how
    many are left; both blocks together get `budget_bytes`.
    """

    def __init__(self, order: Order, start: Callable[[SegmentColumns, int], int], budget_bytes: int) -> None:
        self._order, self._start, self._budget_bytes = order, start, budget_bytes
        # One thread: what the allocator keeps for each thread that ever planned a block would add up.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phalanx-ahead")
        self._planned = range(0)
        self._last: Future[None] | None = None

    def reached(self, window: int) -> None:
        """Says that `window` has been read, so the indices of its block are at hand."""
        if window in self._planned:
            return
        if self._last is not None and self._last.done():
            self._last.result()
        self._planned = range(window, self._block_end(window))
        self._last = self._thread.submit(self._plan, self._planned)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _plan(self, windows: range) -> None:
        try:
            left = self._ask(windows.start, windows.stop, self._budget_bytes)
            if left > 0:
                self._ask(windows.stop, self._block_end(windows.stop), left)
        except (OutsideError, PhalanxError) as error:
            _LOG.info("not fetched ahead: %s", error)

    def _ask(self, start: int, stop: int, budget_bytes: int) -> int:
        seq_len = self._order.seq_len
        return self._start(self._order.between(start * seq_len, stop * seq_len), budget_bytes)

    def _block_end(self, window: int) -> int:
        """The first window behind the block that holds the last token of `window`."""
        shard = int(self._order.window(window).shard[-1])
        return self._order.span_of_block(self._order.epoch_of_last(window), shard)[1]
