"""The first lines of the `phalanx` command: an interruption during its imports ends it as quietly as a later one, and
what gRPC's core would write before our own line is silenced before it is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# Commands whose processes read or keep what gRPC writes to their logs.
_WITH_LOGS = ("up", "demo", "run")
_INTERRUPTED = b"phalanx: interrupted\n"


def main() -> None:
    """Runs the command line; see `phalanx.cli.main`."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:  # not for a command in the background, which ignores Ctrl-C
        signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] and sys.argv[1] not in _WITH_LOGS:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from phalanx.cli.main import main as run

    try:
        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # between two steps of the command line's own handling
        os.write(2, _INTERRUPTED)
        sys.exit(130)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Ends the process at once: nothing is open yet, and an exception could be swallowed by what is being imported, or
    told with its traceback.
    """
    os.write(2, _INTERRUPTED)
    os._exit(130)
