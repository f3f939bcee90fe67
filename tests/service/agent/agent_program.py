"""An agent whose ranks need no torch: `python agent_program.py CONFIG`; ends on SIGTERM."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from phalanx.agent.agent import Agent
from phalanx.agent.stopping import until_asked
from phalanx.rpc.config import read_service

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    until_asked(lambda: Agent(read_service(Path(sys.argv[1])), entry="agent_ranks:run", preload=()))
