"""The first lines of the `phalanx` command: an interruption during its imports ends it as quietly as a later one."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; see `phalanx.cli.main`."""
    try:
        from phalanx.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("phalanx: interrupted\n")
        sys.exit(130)
    run()
