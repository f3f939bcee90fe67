"""What a rank knows about itself, given by the fork server or taken from torchrun's environment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.gang.wire import encode, write_all

Report = Callable[..., None]


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's place in its gang.

    report(kind, **fields): tells the parent something, in plain JSON values; safe from any thread.
    master_listen_fd: on rank 0 of a forked gang, the listening socket behind master_address:master_port.
    attempt: separates the rendezvous keys of one start from another's.
    uses_agent_store: torchrun's own agent serves the store, no rank does.
    """

    rank: int
    world_size: int
    arguments: Mapping[str, Any]
    report: Report
    master_address: str
    master_port: int
    master_listen_fd: int | None = None
    attempt: str = "0"
    environ: Mapping[str, str] = field(default_factory=dict)
    uses_agent_store: bool = False


class PipeReport:
    """Reports as lines on this rank's own pipe; raises BrokenPipeError when the parent is gone (the rank then dies with
    it).
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def __call__(self, kind: str, /, **fields: Any) -> None:
        line = encode({"kind": kind, "time_monotonic_s": time.monotonic(), "fields": fields})
        with self._lock:
            write_all(self._fd, line)


def torchrun_context(arguments: Mapping[str, Any], report: Report) -> RankContext:
    """The context of a rank that torchrun (or another launcher with its variables) started.

    Raises PhalanxError when RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing.
    """
    environ = dict(os.environ)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise PhalanxError(
            f"environment {', '.join(missing)}",
            expected="the variables that torchrun sets",
            remedy="start with `torchrun -m phalanx.trainer JOB` or use `phalanx run JOB`",
        )
    run, restart = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankContext(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        arguments=arguments,
        report=report,
        master_address=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        attempt=f"torchrun_{run}_{restart}",
        environ=environ,
        uses_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
