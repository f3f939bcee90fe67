"""`python -m phalanx.checkpoint --config FILE`: the checkpoint service as a process, until SIGTERM or SIGINT."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.checkpoint.run import running
from phalanx.rpc import ServiceConfig
from phalanx.rpc.process import run_service


@contextmanager
def serving(config: ServiceConfig, ended: threading.Event) -> Iterator[str]:
    """The service, started."""
    with running(config) as server:
        yield server.where


if __name__ == "__main__":
    sys.exit(run_service("checkpoint", serving))
