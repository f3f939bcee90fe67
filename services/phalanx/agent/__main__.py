"""`python -m phalanx.agent --config FILE`: the agent of this node, until SIGTERM.

Exit code: 0 after SIGTERM or SIGINT (a second one ends ranks at once), 2 for what the user must change, 1 when ranks
could not be ended.
"""

from __future__ import annotations

import sys

from phalanx.agent.agent import Agent
from phalanx.agent.stopping import until_asked
from phalanx.rpc.config import read_service
from phalanx.rpc.process import exit_code, parse_config


def main() -> int:
    """Holds the ranks of this node; the exit code."""
    config = parse_config("agent")
    return exit_code(lambda: until_asked(lambda: Agent(read_service(config))))


if __name__ == "__main__":
    sys.exit(main())
