"""A program that holds gangs as an agent does: two fork servers, one of them started by a thread that is not the main
one, while other threads are at work. Takes the arguments of gang_parent.py and tells as it does, but for the outcome.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from gang_parent import tell

from phalanx.gang import ForkServer, GangOrder


def hold(log_dir: str, world_size: int, entry: str) -> None:
    with ForkServer((), {"PYTHONPATH": str(Path(__file__).parent)}) as server:
        tell("server", pid=server.pid)
        gang = server.start(GangOrder(world_size, entry, Path(log_dir)))
        tell("gang", pids=list(gang.pids.values()))
        while not gang.over:
            for event in gang.events(3600.0):
                tell("event", rank=event.rank, event=event.kind)


def main() -> None:
    log_dir, world_size, entry, *_ = sys.argv[1:]
    for _ in range(4):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.Thread(target=hold, args=(f"{log_dir}/thread", int(world_size), entry), daemon=True).start()
    hold(f"{log_dir}/main", int(world_size), entry)


if __name__ == "__main__":
    main()
