"""`dying_service.py NUMBER LOG --config FILE`: the checkpoint service, which SIGKILLs itself right before that
operation on a job's storage or on its own database, counted from 0. Each operation that it did is a line of LOG.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

from phalanx.checkpoint import run
from phalanx.checkpoint.__main__ import serving
from phalanx.checkpoint.store import Database
from phalanx.lineage.registry import RegisteredJob
from phalanx.objects import ObjectStore
from phalanx.objects.faults import Call, Fault, FaultyStore, kill_before
from phalanx.objects.memory import MemoryStore
from phalanx.rpc.process import run_service

NUMBER, LOG = int(sys.argv.pop(1)), sys.argv.pop(1)
NUMBERS = itertools.count()
OUTPUT = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(call: Call) -> None:
    os.write(OUTPUT, f"{call.operation} {call.key}\n".encode())


def watched(store: ObjectStore) -> FaultyStore:
    at_number = kill_before(lambda call: next(NUMBERS) == NUMBER)
    return FaultyStore(store, [at_number, Fault(lambda call: True, before=note)], streams=True)


class WatchedDatabase:
    """The service's database; each of its transactions counts."""

    def __init__(self, *args: Any) -> None:
        self._database, self._watch = Database(*args), watched(MemoryStore())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._database, name)
        return lambda *args: self._watch.run("database", name, lambda: method(*args))


if __name__ == "__main__":
    open_job = RegisteredJob.store
    RegisteredJob.store = lambda self: watched(open_job(self))  # type: ignore[method-assign]
    run.Store = WatchedDatabase  # type: ignore[assignment, misc]
    sys.exit(run_service("checkpoint", serving))
