"""Turns exceptions into one clear line and an exit code: 2 for what the user must change, 1 for what failed."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from phalanx.cli.standard_output import OutputLostError, drop_output
from phalanx.core.errors import OutsideError, PhalanxError

# The base of typer's usage errors, wherever this version of typer keeps it.
UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130


def run_reporting_errors(app: typer.Typer) -> int:
    """Runs the command line; returns the exit code. Unexpected exceptions are bugs and keep their traceback."""
    try:
        with _first_retry_told():
            result = app(standalone_mode=False)
        sys.stdout.flush()
        code = int(result) if isinstance(result, int) else 0
        if code == INTERRUPTED:  # typer makes this of KeyboardInterrupt
            sys.stderr.write("phalanx: interrupted\n")
        return code
    except PhalanxError as error:
        sys.stderr.write("".join(f"phalanx: {line}\n" for line in str(error).splitlines()))
        return 2
    except typer.Exit as exit_:
        return int(exit_.exit_code)
    except UsageError as error:
        sys.stderr.write(f"phalanx: {error.format_message()}\n")  # type: ignore[attr-defined]
        return 2
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("phalanx: interrupted\n")
        return INTERRUPTED
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 2 if _is_not_up(error) else 1
    except FileNotFoundError:
        if not _is_folder_gone():
            raise
        sys.stderr.write("phalanx: the working folder: expected one that exists; it was removed: change to another\n")
        return 2
    except OutputLostError as error:
        drop_output()
        if error.errno != errno.EPIPE:  # who reads no further has what he wants
            sys.stderr.write(f"phalanx: standard output: {error.strerror}\n")
        return 1


def _is_folder_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


@contextmanager
def _first_retry_told() -> Iterator[None]:
    """The first request to storage that has to be tried again is told at once, so that nobody waits without knowing
    for what; the others are not. The logger is named, as most commands need not import what it belongs to.
    """
    logger, handler = logging.getLogger("phalanx.objects.retry"), _Once()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Once(logging.Handler):
    """Writes the first record on standard error, as the command's own lines are."""

    is_used = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.is_used:  # called under the handler's lock
            self.is_used = True
            sys.stderr.write(f"phalanx: {record.getMessage()}\n")


def _is_not_up(error: OutsideError) -> bool:
    """Whether a service that the command needs does not run; asked without importing what most commands don't need."""
    rpc_errors = sys.modules.get("phalanx.rpc.errors")
    return rpc_errors is not None and isinstance(error, rpc_errors.NotUp)
