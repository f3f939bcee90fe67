"""The life of one rank, from its start in a gang (or under torchrun) to its end."""

from __future__ import annotations

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.lineage import Lineage
from phalanx.trainer.preflight import Prepared, from_arguments, job_store


def run_rank(context: RankContext) -> None:
    """Entry of a rank: `context.arguments` as `to_arguments` makes them. Raises what ends the attempt."""
    run_prepared(context, from_arguments(context.arguments))


def run_prepared(context: RankContext, prepared: Prepared) -> None:
    """Meets the other ranks, trains, and reports `finished` or `stopped`."""
    import torch
    import torch.distributed as dist

    from phalanx.trainer.exchange import Exchange
    from phalanx.trainer.loop import Ending, train
    from phalanx.trainer.phases import Phases
    from phalanx.trainer.session import build_session
    from phalanx.trainer.storage_control import Proposal, StorageControl

    job, deadlines = prepared.job, prepared.job.deadlines
    torch.use_deterministic_algorithms(job.training.deterministic)
    phases = Phases(context.report, deadlines)
    phases.enter("init", 0)
    longest_s = max(deadlines.init_s, deadlines.restore_s, deadlines.first_step_s, deadlines.step_s, deadlines.save_s, deadlines.evaluation_s)
    backend = "nccl" if job.cluster.device == "cuda" else "gloo"
    rendezvous_store = init_process_group(context, 2 * longest_s, backend)
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
    session = build_session(prepared, context.rank, control, lineage, store, phases, context.report)
    ending = train(session)
    session.close()
    dist.destroy_process_group()
    context.report("stopped" if ending is Ending.STOPPED else "finished", step=session.step)
