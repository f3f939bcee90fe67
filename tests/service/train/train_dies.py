"""The train service, which dies by SIGKILL at each event of a job once: `train_dies.py FOLDER MOMENT --config FILE`.

MOMENT: `before` the event is in storage, or `after` it. FOLDER remembers where it has died.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from phalanx.lineage.events import EventLog, JobEvent
from phalanx.rpc.process import run_service
from phalanx.train.__main__ import serving


def mark(folder: Path, number: int) -> bool:
    """Whether it is the first time."""
    try:
        (folder / f"died-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die_at_events(folder: Path, moment: str) -> None:
    """Puts the deaths into the event log."""
    append = EventLog.append

    def deadly(log: EventLog, event: JobEvent) -> bool:
        if moment == "before" and mark(folder, event.number):
            os.kill(os.getpid(), signal.SIGKILL)
        is_written = append(log, event)
        if moment == "after" and is_written and mark(folder, event.number):
            os.kill(os.getpid(), signal.SIGKILL)
        return is_written

    EventLog.append = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    die_at_events(Path(sys.argv[1]), sys.argv[2])
    sys.exit(run_service("train", serving, sys.argv[3:]))
