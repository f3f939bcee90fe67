"""Runs an agent until SIGTERM or SIGINT: the first lets ranks commit, a second one ends them at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

from phalanx.agent.agent import Agent

LOG = logging.getLogger(__name__)


def until_asked(make: Callable[[], Agent]) -> None:
    """Call in the main thread. Raises what the agent raises."""
    asked = threading.Event()
    agents: list[Agent] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        """Takes no lock: the thread that it interrupts may hold one."""
        if asked.is_set():
            for agent in agents:
                threading.Thread(target=agent.hurry, daemon=True).start()
        asked.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    with make() as agent:
        agents.append(agent)
        LOG.info("node %s: %d slots", agent.node_id, agent.inventory.num_slots)
        asked.wait()
        LOG.info("told to end: ranks commit first")
