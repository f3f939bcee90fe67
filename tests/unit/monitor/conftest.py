"""A board with a database of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.monitor.attention import AttentiveClock
from phalanx.monitor.board import Board
from phalanx.monitor.gpus import GpuBoard
from phalanx.monitor.store import MonitorStore
from phalanx.monitor.view import View


class Monitor:
    """The monitor's inner parts over one database; `again` makes them anew, as after a kill."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.again()

    def again(self) -> Monitor:
        self.store = MonitorStore(self.url)
        self.board = Board(self.store, AttentiveClock())
        self.gpus = GpuBoard(self.store)
        self.view = View(self.board, self.gpus, self.store)
        return self


@pytest.fixture
def monitor(tmp_path: Path) -> Monitor:
    return Monitor(f"sqlite:///{tmp_path}/monitor.sqlite")
