"""Moves the attentive clock, and looks for hangs by it.

Train says which nodes it hears: the time in which a rank's node is not heard is not the rank's, and no hang is told
while train can't say. It is asked every `ASK_EVERY_S`, and once more before a hang is told.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor.board import Board

LOG = logging.getLogger(__name__)
TICK_S, LOOK_EVERY_TICKS, ASK_EVERY_S, ASK_DEADLINE_S = 0.25, 4, 2.0, 2.0
SILENT_NODE_S = 10.0


class Nodes(Protocol):
    """What is used of train."""

    def ListNodes(  # noqa: N802 - the contract's name
        self, request: train_pb.ListNodesRequest, /, *, timeout: float
    ) -> train_pb.ListNodesResponse: ...


class Judge:
    """is_listening: whether train is heard."""

    def __init__(self, board: Board, train: Nodes, is_listening: Callable[[], bool]) -> None:
        self._board, self._train, self._is_listening = board, train, is_listening
        self._stop = threading.Event()
        self._asked_s = -float("inf")
        self._is_refused = False
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Ends."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.wait(TICK_S):
                return
            try:
                now_s = self._board.clock.tick(self._is_listening())
                if number % LOOK_EVERY_TICKS == 0:
                    self._look(now_s)
            except Exception:
                LOG.exception("looking for hangs failed")

    def _look(self, now_s: float) -> None:
        if not self._is_listening() or not self._board.running_nodes():
            return
        is_suspect = self._board.suspects_hang(now_s)
        if not is_suspect and time.monotonic() - self._asked_s < ASK_EVERY_S:
            return
        heard = self._heard_nodes()
        if heard is None:
            self._board.pause_nodes(self._board.running_nodes(), now_s)
            return
        unheard = self._board.running_nodes() - heard
        self._board.pause_nodes(unheard, now_s)
        if is_suspect:
            self._board.judge_hangs(now_s, unheard)

    def _heard_nodes(self) -> frozenset[str] | None:
        """The nodes that train hears; None where it can't say."""
        self._asked_s = time.monotonic()
        try:
            nodes = self._train.ListNodes(train_pb.ListNodesRequest(), timeout=ASK_DEADLINE_S).nodes
        except OutsideError:
            return None
        except PhalanxError as error:
            if not self._is_refused:
                LOG.error("train does not say which nodes it hears, so no hang can be told: %s", error)
            self._is_refused = True
            return None
        self._is_refused = False
        return frozenset(node.node_id for node in nodes if node.connected and node.silent_s < SILENT_NODE_S)
