"""An agent whose ranks need no torch: `python agent_program.py CONFIG`; ends on SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

from phalanx.agent.agent import Agent
from phalanx.rpc.config import read_service


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    with Agent(read_service(Path(sys.argv[1])), entry="agent_ranks:run", preload=()):
        asked.wait()


if __name__ == "__main__":
    main()
