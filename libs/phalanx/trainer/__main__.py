"""`torchrun -m phalanx.trainer JOB.toml [--set section.key=value ...]`: the loop of `phalanx run` under torchrun or a
like launcher.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang.context import torchrun_context
from phalanx.spec import load_job
from phalanx.spec.effects import without_effect
from phalanx.trainer.figures import Figures
from phalanx.trainer.preflight import Prepared, prepare, to_arguments
from phalanx.trainer.rank import run_rank
from phalanx.trainer.watchdog import Watchdog


def main() -> int:
    """Exit code: 0 finished or stopped, 1 failed, 2 something that the user must change."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.trainer", description="Train a job under torchrun.")
    parser.add_argument("job", help="the job file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key of the job file"
    )
    options = parser.parse_args()
    try:
        watchdog = Watchdog(int(os.environ.get("RANK", "0")))
        context = torchrun_context({}, watchdog.report)
        job, per_node = load_job(options.job, options.set), _ranks_per_node(context.world_size)
        prepared = prepare(job, context.world_size, is_first=context.rank == 0, ranks_per_node=per_node)
        context = replace(context, arguments=to_arguments(prepared))
        if context.rank != 0:
            with watchdog:
                run_rank(context)
        else:
            _warn(prepared)
            with Figures(prepared.job) as figures, watchdog:
                run_rank(replace(context, report=partial(_tell, figures, watchdog)))
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 2
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return 1
    return 0


def _ranks_per_node(world_size: int) -> int | None:
    """By what is the same on every node, also where nodes are unlike: all must choose one layout. None where the
    launcher does not say."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    return -(-world_size // nodes) if nodes else None


def _warn(prepared: Prepared) -> None:
    for line in prepared.said:
        sys.stderr.write(f"{line}\n")
    for warning in (*prepared.warnings, *without_effect(prepared.job, prepared.layout, under_torchrun=True)):
        sys.stderr.write(f"warning: {warning}\n")


def _tell(figures: Figures, watchdog: Watchdog, kind: str, /, **fields: Any) -> None:
    """One line for each event of rank 0 that a person may want to see; the same events feed the sinks. Events of other
    ranks are rank 0's too, or concern nobody.
    """
    watchdog.report(kind, **fields)
    figures.observe(kind, fields)
    if kind != "phase":
        shown = " ".join(
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in fields.items()
        )
        sys.stderr.write(f"{kind} {shown}\n")


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
