"""A program that owns a fork server and a gang, for tests that kill it: tells pids and events as lines of JSON on
stdout.

`python gang_parent.py LOG_DIR WORLD_SIZE ENTRY [GRACE_S] [PRELOAD ...]`; ends like a supervised run: the outcome is its
last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from phalanx.gang import Budget, Event, ForkServer, Gang, GangOrder, StopSignals, supervise


def tell(kind: str, **fields: object) -> None:
    os.write(1, json.dumps({"kind": kind, **fields}).encode() + b"\n")  # one call: threads tell too


def main() -> None:
    log_dir, world_size, entry, grace_s, *preload = sys.argv[1:]
    environ = {"PYTHONPATH": str(Path(__file__).parent)}
    with StopSignals() as stop:
        tell("handlers")
        with ForkServer(preload, environ) as server:
            tell("server", pid=server.pid)

            def start(number: int) -> Gang:
                gang = server.start(GangOrder(int(world_size), entry, Path(log_dir) / str(number), attempt=number))
                tell("gang", pids=list(gang.pids.values()))
                return gang

            def on_event(event: Event) -> None:
                tell("event", rank=event.rank, event=event.kind)

            outcome = supervise(start, Budget(1), on_event, stop_grace_s=float(grace_s), stop=stop)
    cause = outcome.first_cause
    tell("outcome", state=outcome.state, cause=cause and cause.kind, pid=os.getpid())


if __name__ == "__main__":
    main()
