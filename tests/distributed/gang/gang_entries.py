"""What the ranks of the gang tests do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang import RankContext, init_process_group


def echo(context: RankContext) -> None:
    context.report("result", rank=context.rank, arguments=dict(context.arguments), environ=os.environ.get("GREETING"))


def tell_environ(context: RankContext) -> None:
    context.report("result", environ=dict(os.environ))


def long_report(context: RankContext) -> None:
    context.report("result", text="x" * context.arguments["num_bytes"], rank=context.rank)


def wait_forever(context: RankContext) -> None:
    context.report("phase", name="wait", step=0, deadline_s=600)
    threading.Event().wait()


def wait_deaf(context: RankContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_forever(context)


def raise_user_error(context: RankContext) -> None:
    if context.rank == 1:
        raise PhalanxError("[model] dim", value=7, expected="a multiple of 8", remedy="set it to 8")
    wait_forever(context)


def raise_outside(context: RankContext) -> None:
    raise OutsideError("the store is gone") from ConnectionResetError("Connection reset by peer")


def leave_silently(context: RankContext) -> None:
    if context.rank == 2:
        os._exit(7)
    wait_forever(context)


def leave_with_zero(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(0)


def exit_politely(context: RankContext) -> None:
    sys.exit(0)


def open_descriptors(context: RankContext) -> None:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    context.report("result", targets=sorted(str(link.readlink()) for link in links if link.is_symlink()))


def leave_a_child(context: RankContext) -> None:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    context.report("result", child=child)


def ask_terminal(context: RankContext) -> None:
    if context.rank == 0:
        print("your name?")  # noqa: T201
        context.report("result", answer=input(), tty=sys.stdin.isatty() and sys.stdout.isatty())


def all_reduce_once(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    init_process_group(context, 60)
    value = torch.tensor([float(context.rank)])
    dist.all_reduce(value)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local = [int(os.environ[name]) for name in names]
    context.report("result", total=value.item(), threads=torch.get_num_threads(), local=local)
    dist.destroy_process_group()


def meet_briefly(context: RankContext) -> None:
    init_process_group(context, 2)


def raise_late(context: RankContext) -> None:
    """Rank 2 drops its connections first and tells why only after its peers have failed."""
    import torch
    import torch.distributed as dist

    init_process_group(context, 60)
    dist.all_reduce(torch.ones(1))
    if context.rank == 2:
        try:
            raise ValueError("the loss went to the moon")
        finally:
            dist.destroy_process_group()
            time.sleep(0.5)
    for _ in range(1000):
        dist.all_reduce(torch.ones(1))


def a_long_nap() -> None:
    time.sleep(600)


def nap_in_collectives_place(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    context.report("phase", name="init", step=0, deadline_s=60)
    init_process_group(context, 120)
    dist.all_reduce(torch.ones(1))
    context.report("phase", name="step", step=1, deadline_s=context.arguments["deadline_s"])
    if context.rank == context.arguments["sleeper"]:
        a_long_nap()
    dist.all_reduce(torch.ones(1))


def save_slowly(context: RankContext) -> None:
    """Rank 0 saves for longer than a step may take, while the others wait for it in the next step."""
    import torch
    import torch.distributed as dist

    context.report("phase", name="init", step=0, deadline_s=60)
    init_process_group(context, 120)
    dist.all_reduce(torch.ones(1))
    context.report("phase", name="save", step=1, deadline_s=60)
    if context.rank == 0:
        time.sleep(context.arguments["save_s"])
    context.report("phase", name="step", step=2, deadline_s=context.arguments["step_s"])
    time.sleep(context.arguments["step_s"] / 2)
    dist.all_reduce(torch.ones(1))


def differing_attempts(context: RankContext) -> None:
    import torch

    from phalanx.trainer.session import require_one_attempt, require_one_code

    init_process_group(context, 60)
    device = torch.device("cpu")
    require_one_code(f"sha256:{'f' * 64}", device)
    with pytest.raises(PhalanxError, match="the same on every rank"):
        require_one_code(f"sha256:{'a' if context.rank else 'b'}{'f' * 63}", device)
    require_one_attempt(3, device)
    require_one_attempt(3 if context.rank else 4, device)


def mismatch(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    init_process_group(context, 60)
    dist.all_reduce(torch.ones(4096 if context.rank == 1 else 4))


def commit_on_sigterm(context: RankContext) -> None:
    """Reports its phases, and on SIGTERM commits and returns."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    context.report("phase", name="step", step=1, deadline_s=60)
    asked.wait()
    context.report("committed", step=1)
    context.report("stopped", step=1)


def fail_until(context: RankContext) -> None:
    """Attempt n commits when `commits[n]` says so, then raises unless `good_attempt` is reached."""
    number = int(context.attempt)
    if number in context.arguments["commits"] and context.rank == 0:
        context.report("committed", step=number)
    if number < context.arguments["good_attempt"]:
        raise RuntimeError(f"attempt {number} fails")


def all_reduce_until_dead(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    init_process_group(context, 60)
    dist.all_reduce(torch.ones(1))
    context.report("phase", name="step", step=1, deadline_s=60)
    while True:
        dist.all_reduce(torch.ones(1))


def import_slowly(context: RankContext) -> None:
    """A rank that has installed no handler for SIGTERM yet."""
    context.report("phase", name="import", step=0, deadline_s=60)
    threading.Event().wait()
