"""Pages that go round in a few buffers, a thread each: it reads a page into its buffer, hands it to the caller to be
computed, writes it, and goes on to the buffer's next page.

So all buffers but the one that is computed are being read or written at any time: the disk always has several requests,
and a thread that the system lets wait, as it does on a busy host, holds up nobody while other pages are there. Threads
begin once a round, not once a page: to begin one is to wait until the system lets it run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from phalanx.snapshot.background import begin

Move = Callable[[int, int], None]


def go_round(num_pages: int, num_buffers: int, read: Move, compute: Move, write: Move) -> None:
    """Calls `read`, `compute` and `write` of (page, buffer) in this order for each page, whose buffer is page modulo
    `num_buffers`: `compute` in the caller's thread and in order of pages, the others in the buffer's thread.

    Raises what any of them raises, once all threads have ended; pages behind it may then be read or written as well.
    """
    filled: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(min(num_buffers, num_pages))]
    computed: list[SimpleQueue[bool]] = [SimpleQueue() for _ in filled]

    def serve(buffer: int) -> None:
        try:
            for page in range(buffer, num_pages, len(filled)):
                read(page, buffer)
                filled[buffer].put(True)
                if not computed[buffer].get():
                    return
                write(page, buffer)
        finally:
            filled[buffer].put(False)

    threads: list[Future[None]] = []
    try:
        threads.extend(begin(partial(serve, buffer), "optimizer-pages") for buffer in range(len(filled)))
        for page in range(num_pages):
            buffer = page % len(filled)
            if not filled[buffer].get():
                break
            compute(page, buffer)
            computed[buffer].put(True)
    finally:
        for queue in computed:
            queue.put(False)
        failures = [thread.exception() for thread in threads]
    for failure in failures:
        if failure is not None:
            raise failure
