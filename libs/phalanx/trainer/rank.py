"""The life of one rank, from its start in a gang (or under torchrun) to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.errors import PhalanxError
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.lineage import Lineage, position_after
from phalanx.lineage.wishes import Wishes
from phalanx.models.own import told
from phalanx.trainer.code import require_own_code
from phalanx.trainer.network import enter_network
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Prepared, from_arguments
from phalanx.trainer.shipping import enter_code

if TYPE_CHECKING:
    from phalanx.objects import ObjectStore
    from phalanx.trainer.agent_control import Agent, AgentControl
    from phalanx.trainer.agent_keeper import AgentKeeper
    from phalanx.trainer.exchange import Exchange
    from phalanx.trainer.loop import Ending
    from phalanx.trainer.phases import Phases
    from phalanx.trainer.session import Session
    from phalanx.trainer.storage_control import StorageControl

DEBUG_TIMEOUT_S = 7 * 24 * 3600.0


def run_rank(context: RankContext) -> None:
    """Entry of a rank: `context.arguments` as `to_arguments` makes them, with `agent` (socket, job, attempt) where an
    agent started it. Raises what ends the attempt.
    """
    prepared = from_arguments(context.arguments)
    enter_code(prepared.job)
    if "agent" in context.arguments:
        require_own_code(prepared.job, prepared.code_digest)
    try:
        run_prepared(context, prepared, context.arguments.get("debug_rank"))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        raise PhalanxError(
            "code of the job", expected="no exit while the job runs", remedy=f"take it out: {told(stop)}"
        ) from stop


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

    job, deadlines = prepared.job, prepared.job.deadlines
    if job.cluster.device == "cuda":
        enter_network(job.cluster.network)
    device = open_device(job.cluster.device, deterministic=job.training.deterministic)
    agent = agent_of(context)
    phases = Phases(context.report, deadlines, waits_for_services=agent is not None)
    phases.enter("init", 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout_s = 2 * phases.longest_s if debug_rank is None else DEBUG_TIMEOUT_S
    exchange = Exchange(init_process_group(context, timeout_s, backend), context.rank)
    store = job_store(job)
    lineage = Lineage(store)
    control = control_of(context, prepared, agent, lineage, store, exchange, phases)
    control.listen()
    session = build_session(
        prepared,
        context.rank,
        device,
        control,
        lineage,
        store,
        phases,
        context.report,
        reports_step_times=agent is not None,
        keeper=keeper_of(agent, prepared, context.rank),
    )
    ending = train(session) if debug_rank != context.rank else _train_in_debugger(session)
    session.close()
    dist.destroy_process_group()
    context.report("stopped" if ending is Ending.STOPPED else "finished", step=session.step)


def agent_of(context: RankContext) -> Agent | None:
    """The agent that started this rank, if one did; rank 0 gets ready to call it while the ranks meet."""
    place = context.arguments.get("agent")
    if place is None:
        return None
    from phalanx.trainer.agent_control import Agent, AgentPlace

    agent = Agent(AgentPlace.from_json(place))
    if context.rank == 0:
        agent.warm_up()
    return agent


def keeper_of(agent: Agent | None, prepared: Prepared, rank: int) -> AgentKeeper | None:
    """What keeps steps in memory, where the job asks for it and there is an agent."""
    if agent is None or not prepared.job.checkpoint.memory_interval:
        return None
    from phalanx.trainer.agent_keeper import AgentKeeper

    return AgentKeeper(agent, rank)


def control_of(
    context: RankContext,
    prepared: Prepared,
    agent: Agent | None,
    lineage: Lineage,
    store: ObjectStore,
    exchange: Exchange,
    phases: Phases,
) -> AgentControl | StorageControl:
    """The control of a rank: its agent's, or storage's where there is none."""
    from phalanx.trainer.agent_control import AgentControl
    from phalanx.trainer.storage_control import Proposal, StorageControl

    job, rank = prepared.job, context.rank
    if agent is not None:
        plan_s = job.deadlines.plan_s
        return AgentControl(
            agent, lineage, exchange, rank=rank, plan_s=plan_s, enter=phases.enter, report=context.report
        )
    return StorageControl(
        lineage,
        store,
        exchange,
        Proposal(prepared.code_digest, prepared.identity_digest, job.placement(context.world_size)),
        rank=rank,
        world_size=context.world_size,
        deadline_s=job.deadlines.save_s,
        report=context.report,
        on_bad_shard=job.recovery.on_bad_shard,
        wishes=Wishes(store) if job.data.is_mixture else None,
        position_after=lambda step: position_after(step, job.training.global_batch_size, prepared.origin),
    )


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
