"""A job on this machine: one fork server, gang after gang from the newest live checkpoint until the job is done,
stopped or hopeless.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.gang import Budget, Event, ForkServer, Gang, GangOrder, GangOutcome, StopSignals, supervise
from phalanx.gang.fork_server import READY_DEADLINE_S
from phalanx.lineage import Lineage
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Prepared, to_arguments

ENTRY = "phalanx.trainer.rank:run_rank"
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "phalanx.trainer.rank",
    "phalanx.trainer.loop",
    "phalanx.trainer.storage_control",
)


def fork_server(init_s: float = 0.0) -> ForkServer:
    """A fork server that has imported all that a rank needs; a context manager. init_s: the job's deadlines.init_s,
    which it may take where that is more than its own.
    """
    remedy = "free the machine's processors, or wait longer by a greater deadlines.init_s"
    return ForkServer(PRELOAD, ready_deadline_s=max(READY_DEADLINE_S, init_s), remedy=remedy)


def log_folder(prepared: Prepared) -> Path:
    """A fresh folder name for the logs of the ranks of one `phalanx run`."""
    job = prepared.job
    return Path(job.metrics.folder) / job.job.name / "ranks" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S")


def newest_step(prepared: Prepared) -> int:
    """The step of the newest live checkpoint, from which a run goes on; 0 where there is none."""
    live = Lineage(job_store(prepared.job)).checkpoints()
    return live[-1].step if live else 0


def run_job(
    prepared: Prepared,
    server: ForkServer,
    on_event: Callable[[Event], None],
    *,
    on_start: Callable[[Gang], None] = lambda gang: None,
    stop: StopSignals | None = None,
    debug_rank: int | None = None,
) -> GangOutcome:
    """Runs the job to its end; see `gang.supervise` for what the outcome says.

    on_event: every event of ranks and supervisor. on_start: each gang as it starts. debug_rank: gets this process's
    terminal and pdb, and no deadline counts. Raises PhalanxError when there is no terminal for it.
    """
    job = prepared.job
    arguments = to_arguments(prepared) | {"debug_rank": debug_rank}
    folder = log_folder(prepared)

    def start(number: int) -> Gang:
        order = GangOrder(
            world_size=prepared.layout.world_size,
            entry=ENTRY,
            arguments=arguments,
            log_dir=folder / f"attempt-{number}",
            attempt=number,
        )
        gang = server.start(order) if debug_rank is None else _start_debugged(server, order, debug_rank)
        on_start(gang)
        return gang

    budget = Budget(job.recovery.max_attempts_without_progress)
    return supervise(
        start,
        budget,
        on_event,
        stop_grace_s=job.deadlines.grace_s,
        deadlines_off=debug_rank is not None,
        stop=stop,
    )


def _start_debugged(server: ForkServer, order: GangOrder, debug_rank: int) -> Gang:
    if not 0 <= debug_rank < order.world_size:
        raise PhalanxError(
            "--debug-rank",
            value=debug_rank,
            expected=f"a rank from 0 to {order.world_size - 1}",
            remedy="choose one of them",
        )
    try:
        terminal = Path("/dev/tty").open("r+b", buffering=0)  # noqa: SIM115 (closed below, on every path)
    except OSError as error:
        raise PhalanxError("--debug-rank", expected="a terminal", remedy="run it from an interactive shell") from error
    with terminal:
        sys.stderr.write(
            f"phalanx: rank {debug_rank} has this terminal and pdb; ALL DEADLINES ARE OFF, a hang will not be found\n"
        )
        return server.start(replace(order, debug_rank=debug_rank), terminal.fileno())
