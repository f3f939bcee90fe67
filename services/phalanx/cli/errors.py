"""Turns exceptions into one clear line and an exit code: 2 for what the user must change, 1 for what failed."""

from __future__ import annotations

import sys

import click
import typer

from phalanx.core.errors import OutsideError, PhalanxError


def run_reporting_errors(app: typer.Typer) -> int:
    """Runs the command line; returns the exit code. Unexpected exceptions are bugs and keep their traceback."""
    try:
        result = app(standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 2
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("phalanx: interrupted\n")
        return 130
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 1
