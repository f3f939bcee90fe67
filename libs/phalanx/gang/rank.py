"""What a forked child does before and after the entry function: its own signals, environment, log, stack dumps, report
and exit code.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import linux
from phalanx.gang.context import PipeReport, RankContext
from phalanx.gang.order import RETURNED, GangOrder, Rendezvous

EXIT_ERROR, EXIT_USER_ERROR = 1, 2
FLUSH_DEADLINE_S = 3
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place and the descriptors that are its own."""

    order: GangOrder
    rank: int
    report_fd: int
    rendezvous: Rendezvous
    listen_fd: int | None
    terminal_fd: int | None
    server_pid: int

    def fds(self) -> list[int]:
        return [fd for fd in (self.report_fd, self.listen_fd, self.terminal_fd) if fd is not None]


def run(seat: Seat, not_mine: Iterable[int]) -> NoReturn:
    """Be the rank, from the fork to the exit; never returns into the server's code."""
    code = EXIT_ERROR
    try:
        linux.die_with_parent(seat.server_pid)
        _reset_process(not_mine)
        report = PipeReport(seat.report_fd)
        code = _reported(lambda: _settle_and_call(seat, report), report)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FLUSH_DEADLINE_S)  # a stream that nobody reads must not keep the rank alive
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)  # no atexit, no waiting for threads: what the entry opened, it closed


def _reset_process(not_mine: Iterable[int]) -> None:
    signal.set_wakeup_fd(-1)
    with suppress(OSError):
        os.setpgid(0, 0)
    for fd in not_mine:
        os.close(fd)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _reported(action: Callable[[], None], report: PipeReport) -> int:
    """Run `action`, report what it raises or that it returned, and give the exit code."""
    try:
        action()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            report("error", **describe(stop))
            return stop.code if isinstance(stop.code, int) else EXIT_ERROR
    except BaseException as error:  # torch has errors that are no Exception
        report("error", **describe(error))
        LOG.exception("the rank's entry raised")
        return EXIT_USER_ERROR if isinstance(error, PhalanxError) else EXIT_ERROR
    report(RETURNED)
    return 0


def _settle_and_call(seat: Seat, report: PipeReport) -> None:
    order = seat.order
    _open_streams(seat)
    os.environ.update(order.environ)
    os.environ.update(_launch_variables(seat))
    report("entry", deadline_s=order.import_deadline_s)
    entry = resolve(order.entry)
    entry(
        RankContext(
            rank=seat.rank,
            world_size=order.world_size,
            arguments=order.arguments,
            report=report,
            master_address=seat.rendezvous.address,
            master_port=seat.rendezvous.port,
            master_listen_fd=seat.listen_fd,
            attempt=str(order.attempt),
            environ=dict(os.environ),
        )
    )


def _launch_variables(seat: Seat) -> dict[str, str]:
    """The variables that every launcher sets, for a user's code that reads them."""
    here = seat.order.local_ranks
    ranks = {"RANK": seat.rank, "LOCAL_RANK": here.index(seat.rank)}
    sizes = {"WORLD_SIZE": seat.order.world_size, "LOCAL_WORLD_SIZE": len(here)}
    return {
        **{name: str(value) for name, value in {**ranks, **sizes}.items()},
        "MASTER_ADDR": seat.rendezvous.address,
        "MASTER_PORT": str(seat.rendezvous.port),
    }


def _open_streams(seat: Seat) -> None:
    """stdin, stdout, stderr on the terminal (debug rank) or on nothing and the log; stack dumps on SIGUSR2 into their
    own file.
    """
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if seat.terminal_fd is not None:
        source = sink = seat.terminal_fd
    else:
        source = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        sink = os.open(seat.order.log_path(seat.rank), append, 0o644)
    for fd, target in ((source, 0), (sink, 1), (sink, 2)):
        os.dup2(fd, target, inheritable=True)
    for fd in {source, sink}:
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format=f"rank {seat.rank} %(name)s: %(message)s"
    )
    faulthandler.enable(2)
    stack_fd = os.open(seat.order.stack_path(seat.rank), append, 0o644)
    faulthandler.register(signal.SIGUSR2, stack_fd, all_threads=True)


def resolve(entry: str) -> Callable[[RankContext], object]:
    """The function that "package.module:function" names. Raises PhalanxError when there is none."""
    module_name, _, function_name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PhalanxError(
            "entry", value=entry, expected="package.module:function that can be imported", remedy=f"{error}"
        ) from error
    assert callable(function), f"{entry} is not callable"
    return function  # type: ignore[no-any-return]


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain values. chain: the error and what it came from, newest first, as [class names of its MRO,
    message].
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "where": place,
        "user_error": isinstance(error, PhalanxError),
        "outside": isinstance(error, OutsideError),
        "chain": [[[kind.__name__ for kind in type(link).__mro__], str(link)] for link in _links(error)],
    }


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, its cause's cause; an implicit context counts unless `from None` hid it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
