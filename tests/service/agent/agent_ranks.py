"""What the ranks of the agent's tests do: no torch, some with the agent's own socket."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.api.agent.v1.rank_service_pb2_grpc import RankServiceStub
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.gang import RankContext
from phalanx.rpc.unix import connect_unix


def run(context: RankContext) -> None:
    """Does what the job's arguments name."""
    globals()[context.arguments["do"]](context)


def progress(context: RankContext, step: int) -> None:
    context.report(
        "progress",
        step=step,
        loss=1.0 / step,
        gradient_norm=1.0,
        lr=1e-3,
        tokens=64,
        step_time_s=0.01,
        data_wait_s=0.0,
    )


def train(context: RankContext) -> None:
    """A whole short life."""
    context.report("opened", attempt=int(context.attempt), step=0)
    for step in range(1, context.arguments["steps"] + 1):
        context.report("phase", name="step", step=step, deadline_s=60)
        if context.rank == 0:
            progress(context, step)
    if context.rank == 0:
        context.report("committed", attempt=int(context.attempt), step=step)
    print(f"rank {context.rank} says goodbye", flush=True)  # noqa: T201
    context.report("finished", step=step)


def wait(context: RankContext) -> None:
    """Until SIGTERM; then commits and returns. Commits and goes on at SIGUSR1."""
    asked = threading.Event()
    attempt = int(context.attempt)
    signal.signal(signal.SIGUSR1, lambda *_: context.report("committed", attempt=attempt, step=7))
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    context.report("phase", name="step", step=1, deadline_s=600)
    asked.wait()
    context.report("committed", attempt=int(context.attempt), step=1)
    context.report("stopped", step=1)


def wait_deaf(context: RankContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.report("phase", name="step", step=1, deadline_s=600)
    threading.Event().wait()


def chatter(context: RankContext) -> None:
    """Tells of a step every few milliseconds, and of a commit, until killed."""
    context.report("committed", attempt=int(context.attempt), step=1)
    step = 0
    while True:
        step += 1
        progress(context, step)
        time.sleep(context.arguments["pause_s"])


def raise_error(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("the loss went to the moon")
    threading.Event().wait()


def a_long_nap() -> None:
    time.sleep(600)


def hang(context: RankContext) -> None:
    """Rank 1 stays a step behind."""
    for step in (3, 4) if context.rank == 0 else (3,):
        context.report("phase", name="step", step=step, deadline_s=1.0 if context.rank == 1 else 600)
    a_long_nap()


def hang_after_quick_steps(context: RankContext) -> None:
    for step in range(40):
        context.report("phase", name="step", step=step, deadline_s=600)
        time.sleep(0.01)
    a_long_nap()


def tell_environ(context: RankContext) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    Path(context.arguments["folder"], f"{context.rank}.environ").write_text(
        "\n".join(f"{name}={os.environ[name]}" for name in names)
    )


def call_agent(context: RankContext) -> None:
    """Rank 0 speaks to the agent as a trainer does: opens, renews, commits, waits for the order to stop."""
    if context.rank != 0:
        return
    mine = context.arguments["agent"]
    job, attempt = mine["job"], mine["attempt"]
    with connect_unix(Path(mine["socket"])) as channel:
        stub = RankServiceStub(channel)
        opened = stub.Open(pb.OpenRequest(job=job, attempt=attempt), timeout=30)
        context.report("opened", attempt=attempt, step=opened.parent.step)
        context.report("phase", name="plan", step=16, deadline_s=60)
        plan = stub.Renew(pb.RenewRequest(job=job, attempt=attempt, step=16), timeout=30).plan
        draft = checkpoint_pb.ManifestDraft(ref=checkpoint_pb.CheckpointRef(attempt=attempt, step=20), world_size=2)
        stub.Commit(pb.CommitRequest(job=job, draft=draft), timeout=30)
        context.report("committed", attempt=attempt, step=20)
        progress(context, plan.horizon_step)
        context.report("phase", name="step", step=21, deadline_s=60)
        for told in stub.WatchOrders(pb.WatchOrdersRequest(job=job, attempt=attempt), timeout=60):
            if told.order == pb.RANK_ORDER_STOP:
                context.report("stopped", step=21)
                return


def renew_for_ever(context: RankContext) -> None:
    """Asks for plans until refused."""
    mine = context.arguments["agent"]
    with connect_unix(Path(mine["socket"])) as channel:
        stub, step = RankServiceStub(channel), 0
        while True:
            stub.Renew(pb.RenewRequest(job=mine["job"], attempt=mine["attempt"], step=step), timeout=30)
            step += 1
            context.report("phase", name="step", step=step, deadline_s=60)
            time.sleep(0.02)


def all_reduce(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    from phalanx.gang import init_process_group

    init_process_group(context, 60)
    value = torch.tensor([float(context.rank)])
    dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()
    context.report("finished", step=int(value.item()))


def all_reduce_for_ever(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    from phalanx.gang import init_process_group

    init_process_group(context, 60)
    dist.all_reduce(torch.ones(1))
    context.report("phase", name="step", step=1, deadline_s=60)
    while True:
        dist.all_reduce(torch.ones(1))
