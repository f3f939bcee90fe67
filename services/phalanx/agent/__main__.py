"""`python -m phalanx.agent --config FILE`: the agent of this node, until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from phalanx.agent.agent import Agent
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.config import read_service

LOG = logging.getLogger("phalanx.agent")


def main() -> int:
    """Exit code: 0 after SIGTERM or SIGINT (a second one ends ranks at once), 2 for what the user must change, 1 when
    ranks could not be ended.
    """
    parser = argparse.ArgumentParser(prog="python -m phalanx.agent", description="Hold the ranks of this node.")
    parser.add_argument("--config", required=True, type=Path, help="the agent's configuration file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asked = threading.Event()

    agents: list[Agent] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        """The first asks, a second one insists; a handler takes no lock."""
        if asked.is_set():
            for agent in agents:
                threading.Thread(target=agent.hurry).start()
        asked.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    try:
        with Agent(read_service(options.config)) as agent:
            agents.append(agent)
            LOG.info("node %s: %d slots", agent.node_id, agent.inventory.num_slots)
            asked.wait()
            LOG.info("told to end: ranks commit first")
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 2
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
