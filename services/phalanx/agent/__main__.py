"""`python -m phalanx.agent --config FILE`: the agent of this node, until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from phalanx.agent.agent import Agent
from phalanx.agent.stopping import until_asked
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.config import read_service


def main() -> int:
    """Exit code: 0 after SIGTERM or SIGINT (a second one ends ranks at once), 2 for what the user must change, 1 when
    ranks could not be ended.
    """
    parser = argparse.ArgumentParser(prog="python -m phalanx.agent", description="Hold the ranks of this node.")
    parser.add_argument("--config", required=True, type=Path, help="the agent's configuration file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        until_asked(lambda: Agent(read_service(options.config)))
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 2
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
