"""`torchrun -m phalanx.trainer JOB.toml [--set section.key=value ...]`: the loop of `phalanx run` under torchrun or a
like launcher.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import partial
from typing import Any

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang.context import torchrun_context
from phalanx.spec import load_job
from phalanx.trainer.figures import Figures
from phalanx.trainer.preflight import prepare, to_arguments
from phalanx.trainer.rank import run_rank


def main() -> int:
    """Exit code: 0 finished or stopped, 1 failed, 2 something that the user must change."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.trainer", description="Train a job under torchrun.")
    parser.add_argument("job", help="the job file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key of the job file"
    )
    options = parser.parse_args()
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "0"))
        context = torchrun_context({}, _keep)
        prepared = prepare(load_job(options.job, options.set), world_size)
        if context.rank != 0:
            run_rank(torchrun_context(to_arguments(prepared), _keep))
        else:
            with Figures(prepared.job) as figures:
                run_rank(torchrun_context(to_arguments(prepared), partial(_tell, figures)))
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 2
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 1
    return 0


def _tell(figures: Figures, kind: str, /, **fields: Any) -> None:
    """One line for each event of rank 0 that a person may want to see; the same events feed the sinks."""
    figures.observe(kind, fields)
    if kind != "phase":
        shown = " ".join(
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in fields.items()
        )
        sys.stderr.write(f"{kind} {shown}\n")


def _keep(kind: str, /, **fields: Any) -> None:
    """Events of other ranks are rank 0's too, or concern nobody."""


def _leave_at_once_on_failure() -> None:
    """A thread that waits for a dead peer's part of a checkpoint must not keep a failed rank and its peers alive."""
    code = 1
    try:
        code = main()
    except SystemExit:
        raise
    except BaseException:  # torch has errors that are no Exception
        logging.getLogger(__name__).exception("the rank failed")
    if code != 0:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _leave_at_once_on_failure()
