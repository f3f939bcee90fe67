"""Forks children that SIGKILL themselves right before a numbered system call on files, or a numbered operation on S3;
run as a program.

Reads lines `ACTION NUMBER URL`, URL being a job's root; answers `killed`, or `done` where the action had fewer calls.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "pwrite", "pread", "fsync", "link", "unlink", "mkdir", "rmdir", "replace", "scandir")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


def die_at(number: int) -> None:
    """From now on call `number`, from 0, is this process's last."""
    counted = itertools.count()

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))


def main() -> None:
    """Serves until its input ends."""
    from saved_job import open_attempt
    from test_snapshot_crash import held_by, save_as_two_ranks

    from phalanx.checkpoint.pruning import prune
    from phalanx.checkpoint.retention import Policy
    from phalanx.lineage import CheckpointRef
    from phalanx.objects import open_store
    from phalanx.objects.faults import FaultyStore, kill_before, number_is

    actions: dict[str, Callable[[Any], object]] = {
        "save": save_as_two_ranks,
        "restore": lambda store: held_by(store, CheckpointRef(1, 5)),
        "open": open_attempt,
        "collect": lambda store: prune(store, Policy(keep_latest=1), dry_run=False, grace_s=0),
    }
    for line in sys.stdin:
        action, number, url = line.split()
        child = os.fork()
        if child == 0:
            store = open_store(url)
            if url.startswith("file:"):
                die_at(int(number))
            else:
                store = FaultyStore(store, [kill_before(number_is(int(number)))], streams=True)
            actions[action](store)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer = {0: "done", -signal.SIGKILL: "killed"}.get(code, f"ended with {code}")
        os.write(1, f"{answer}\n".encode())


if __name__ == "__main__":
    main()
