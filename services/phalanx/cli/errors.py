"""Turns exceptions into one clear line and an exit code: 2 for what the user must change, 1 for what failed."""

from __future__ import annotations

import sys

import typer

from phalanx.core.errors import OutsideError, PhalanxError

# The base of typer's usage errors, wherever this version of typer keeps it.
UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130


def run_reporting_errors(app: typer.Typer) -> int:
    """Runs the command line; returns the exit code. Unexpected exceptions are bugs and keep their traceback."""
    try:
        result = app(standalone_mode=False)
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


def _is_not_up(error: OutsideError) -> bool:
    """Whether a service that the command needs does not run; asked without importing what most commands don't need."""
    rpc_errors = sys.modules.get("phalanx.rpc.errors")
    return rpc_errors is not None and isinstance(error, rpc_errors.NotUp)
