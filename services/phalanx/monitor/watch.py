"""Hears what train tells of all jobs, for ever: connects again behind the last record that it has.

What it missed shows as a gap between two numbers, is counted, and is asked of storage. A record that the rules choke on
is logged and counted, and the next one is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.api.train.v1.train_service_pb2_grpc import TrainServiceStub
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor.board import Board
from phalanx.rpc import OutOfRange

LOG = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
SIGN_OF_LIFE_S = 5.0


class Watch:
    """on_missed: is given the jobs of which records were missed; on_told: whatever came, after it was taken."""

    def __init__(
        self,
        train: TrainServiceStub,
        board: Board,
        on_missed: Callable[[frozenset[str]], None] = lambda _: None,
        on_told: Callable[[train_pb.WatchRecordsResponse], None] = lambda _: None,
    ) -> None:
        self._train, self._board, self._on_missed, self._on_told = train, board, on_missed, on_told
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._heard_s = -float("inf")
        self._starts_over = False
        self.num_failed_records = self.num_connects = 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    def close(self) -> None:
        """Ends."""
        self._stop.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        self._thread.join(5.0)

    @property
    def is_listening(self) -> bool:
        """Whether train was heard within two signs of life."""
        with self._lock:
            return self._stream is not None and time.monotonic() - self._heard_s < 2 * SIGN_OF_LIFE_S

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                failures = 0 if self._listen() else failures + 1
            except OutOfRange as error:
                LOG.warning("train does not have what comes behind the last record (%s): from the beginning", error)
                self._starts_over = True
            except (OutsideError, PhalanxError) as error:
                log = LOG.info if isinstance(error, OutsideError) else LOG.error
                log("train is not heard: %s", error)
                failures += 1
            except Exception:
                LOG.exception("the watch failed")
                failures += 1
            self._stop.wait(min(FIRST_PAUSE_S * 2 ** min(failures, 8), LONGEST_PAUSE_S))

    def _listen(self) -> bool:
        """Until the stream ends; whether anything came."""
        position = self._board.position
        request = train_pb.WatchRecordsRequest(log_id=position.log_id, after=position.number)
        if self._starts_over:
            request = train_pb.WatchRecordsRequest()
            self._starts_over = False
        stream: Any = self._train.WatchRecords(request)
        with self._lock:
            self._stream = stream
            if self._stop.is_set():
                stream.cancel()
        num_told = 0
        try:
            for told in stream:
                with self._lock:
                    self._heard_s = time.monotonic()
                self.num_connects += num_told == 0
                num_told += 1
                self._take(told)
        finally:
            with self._lock:
                self._stream = None
            stream.cancel()
        return num_told > 0

    def _take(self, told: train_pb.WatchRecordsResponse) -> None:
        try:
            missed = self._board.observe(told)
        except Exception:
            self.num_failed_records += 1
            LOG.exception("record %d of %s was not taken", told.number, told.job)
            return
        if missed:
            self._on_missed(missed)
        self._on_told(told)
