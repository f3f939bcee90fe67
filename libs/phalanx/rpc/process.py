"""A service as a process: `python -m phalanx.<name> --config FILE`, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.config import ServiceConfig, read_service

USER_ERROR, FAILED = 2, 1
LOOK_S = 0.2  # how late a signal may be noticed
Serving = Callable[[ServiceConfig, threading.Event], AbstractContextManager[str]]


def run_service(name: str, serving: Serving, arguments: Sequence[str] | None = None) -> int:
    """Serves until it is told to end; the exit code.

    serving: the service, started, as a context manager that gives where it serves, in words, for the log; it may set
    the event to end the process by itself.
    """
    config = parse_config(name, arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def run() -> None:
        with serving(read_service(config), ended) as where:
            logging.getLogger(f"phalanx.{name}").info("serving at %s", where)
            wait_in_main(ended)

    return exit_code(run)


def wait_in_main(told: threading.Event) -> None:
    """Waits for an event that a signal's handler sets; call in the main thread.

    Handlers run in the main thread alone, but the kernel may hand the signal to any thread (always where the main one
    has another pending, as after SIGSTOP), and then nothing wakes a wait without a time limit.
    """
    while not told.wait(LOOK_S):
        pass


def parse_config(name: str, arguments: Sequence[str] | None = None) -> Path:
    """The path that `--config` names; sets the log up, on standard error."""
    parser = argparse.ArgumentParser(prog=f"python -m phalanx.{name}")
    parser.add_argument("--config", type=Path, required=True, help="the process's file, as `phalanx up` writes it")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config: Path = given.config
    return config


def exit_code(run: Callable[[], None]) -> int:
    """0; 2 with a line for what a user must change, 1 with a line for what failed outside."""
    try:
        run()
    except PhalanxError as error:
        sys.stderr.write("".join(f"phalanx: {line}\n" for line in str(error).splitlines()))
        return USER_ERROR
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return FAILED
    return 0
