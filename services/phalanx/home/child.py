"""`python -m phalanx.home.child [--place FILE] [--after FILE] PARENT_PID MODULE ARGUMENTS...`: runs a module that ends
with the supervisor.

The kernel tells when the supervisor is gone. An agent gets SIGTERM then, and ends in its own way: its ranks commit
first. A service waits until the agent (`--after` its place) is gone, since it takes that last checkpoint, and then gets
SIGTERM too; so nothing is left running.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from phalanx.core.errors import OutsideError
from phalanx.gang.linux import die_with_parent
from phalanx.home.places import Living, holder, take

LONGEST_END_S = 60.0  # of an agent beyond its grace
_PAUSE_S = 0.1
_ALONE = signal.SIGUSR2


def main() -> None:
    """Becomes the module."""
    # Until the module has handlers of its own there is nothing to end in order: SIGTERM is no death then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    given = _parsed(sys.argv[1:])
    try:
        if given.place is not None:
            take(given.place, given.grace)
    except (OSError, OutsideError) as error:
        sys.stderr.write(f"phalanx: {error}\n")
        sys.exit(1)
    if given.after is not None:
        _end_after(given.after)
    die_with_parent(given.parent, signal.SIGTERM if given.after is None else _ALONE)
    sys.argv = [given.module, *given.arguments]
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m phalanx.home.child")
    parser.add_argument("--place", type=Path, help="held as long as this process lives")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds that it may need for its end")
    parser.add_argument("--after", type=Path, help="place of the process that ends first")
    parser.add_argument("parent", type=int)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def _holder(place: Path) -> Living | None:
    """Who holds the place; None also where that can't be known: then there is nothing to wait for."""
    try:
        return holder(place)
    except (OSError, OutsideError):
        return None


def _end_after(place: Path) -> None:
    """Once the supervisor is gone: SIGTERM to this process when nobody holds the place any more, or holds it for much
    longer than it may.
    """

    def wait() -> None:
        first = _holder(place)
        end_s = time.monotonic() + (first.grace_s if first is not None else 0.0) + LONGEST_END_S
        while _holder(place) is not None and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def on_alone(signum: int, frame: FrameType | None) -> None:
        threading.Thread(target=wait, name="phalanx-alone", daemon=True).start()

    signal.signal(_ALONE, on_alone)


if __name__ == "__main__":
    main()
