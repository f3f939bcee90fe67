"""The life of one rank, from its start in a gang (or under torchrun) to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.lineage import Lineage
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Prepared, from_arguments

if TYPE_CHECKING:
    from phalanx.trainer.loop import Ending
    from phalanx.trainer.session import Session

DEBUG_TIMEOUT_S = 7 * 24 * 3600.0


def run_rank(context: RankContext) -> None:
    """Entry of a rank: `context.arguments` as `to_arguments` makes them. Raises what ends the attempt."""
    run_prepared(context, from_arguments(context.arguments), context.arguments.get("debug_rank"))


def run_prepared(context: RankContext, prepared: Prepared, debug_rank: int | None = None) -> None:
    """Meets the other ranks, trains, and reports `finished` or `stopped`. debug_rank: trains under pdb; then no
    collective times out.
    """
    import torch.distributed as dist

    from phalanx.trainer.device import open_device
    from phalanx.trainer.exchange import Exchange
    from phalanx.trainer.loop import Ending, train
    from phalanx.trainer.phases import Phases
    from phalanx.trainer.session import build_session
    from phalanx.trainer.storage_control import Proposal, StorageControl

    job, deadlines = prepared.job, prepared.job.deadlines
    device = open_device(job.cluster.device, deterministic=job.training.deterministic)
    phases = Phases(context.report, deadlines)
    phases.enter("init", 0)
    longest_s = max(
        deadlines.init_s,
        deadlines.restore_s,
        deadlines.first_step_s,
        deadlines.step_s,
        deadlines.save_s,
        deadlines.evaluation_s,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout_s = 2 * longest_s if debug_rank is None else DEBUG_TIMEOUT_S
    rendezvous_store = init_process_group(context, timeout_s, backend)
    store = job_store(job)
    lineage = Lineage(store)
    control = StorageControl(
        lineage,
        store,
        Exchange(rendezvous_store, context.rank),
        Proposal(prepared.code_digest, prepared.identity_digest, job.placement(context.world_size)),
        rank=context.rank,
        world_size=context.world_size,
        deadline_s=deadlines.save_s,
        report=context.report,
    )
    control.listen()
    session = build_session(prepared, context.rank, device, control, lineage, store, phases, context.report)
    ending = train(session) if debug_rank != context.rank else _train_in_debugger(session)
    session.close()
    dist.destroy_process_group()
    context.report("stopped" if ending is Ending.STOPPED else "finished", step=session.step)


def _train_in_debugger(session: Session) -> Ending:
    """Stops at the first line of the loop, and again where it raises."""
    import pdb

    from phalanx.trainer.loop import train

    debugger = pdb.Pdb()
    try:
        ending = debugger.runcall(train, session)
    except Exception as error:
        debugger.message(f"{type(error).__name__}: {error}")
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
        raise
    assert ending is not None, "pdb was quit before the loop had ended"
    return ending
