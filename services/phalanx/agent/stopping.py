"""Runs an agent until SIGTERM or SIGINT: the first lets ranks commit, a second one ends them at once.

A terminal and a supervisor may both pass one wish on, so what comes within a second counts as the first.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from phalanx.agent.agent import Agent
from phalanx.rpc.process import wait_in_main

ONE_WISH_S = 1.0
LOG = logging.getLogger(__name__)


def until_asked(make: Callable[[], Agent]) -> None:
    """Call in the main thread. Raises what the agent raises."""
    asked = threading.Event()
    agents: list[Agent] = []
    first_s: list[float] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        """Takes no lock: the thread that it interrupts may hold one."""
        now_s = time.monotonic()
        first_s.append(now_s)
        if now_s > first_s[0] + ONE_WISH_S:
            for agent in agents:
                threading.Thread(target=agent.hurry, daemon=True).start()
        asked.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    with make() as agent:
        agents.append(agent)
        LOG.info("node %s: %d slots", agent.node_id, agent.inventory.num_slots)
        wait_in_main(asked)
        LOG.info("told to end: ranks commit first")
