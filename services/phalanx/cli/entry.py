"""The first lines of the `phalanx` command: an interruption during its imports ends it as quietly as a later one, and
what gRPC's core would write before our own line is silenced before it is imported.
"""

from __future__ import annotations

import os
import sys

# Commands whose processes read or keep what gRPC writes to their logs.
_WITH_LOGS = ("up", "demo", "run")


def main() -> None:
    """Runs the command line; see `phalanx.cli.main`."""
    if sys.argv[1:2] and sys.argv[1] not in _WITH_LOGS:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from phalanx.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("phalanx: interrupted\n")
        sys.exit(130)
    run()
