"""`python -m phalanx.train --config FILE`: the train service as a process, until SIGTERM or SIGINT."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.core.errors import PhalanxError
from phalanx.rpc import ServiceConfig
from phalanx.rpc.process import run_service
from phalanx.train.run import running


@contextmanager
def serving(config: ServiceConfig, ended: threading.Event) -> Iterator[str]:
    """The service, started. Raises PhalanxError at its end where a later train process has replaced it."""
    is_replaced = threading.Event()

    def replaced() -> None:
        is_replaced.set()
        ended.set()

    with running(config, replaced) as server:
        yield server.where
    if is_replaced.is_set():
        raise PhalanxError(
            "train",
            expected="to be the only train process on its storage, and a later one has begun",
            remedy="nothing, where it was replaced; else give each cluster storage of its own",
        )


if __name__ == "__main__":
    sys.exit(run_service("train", serving))
