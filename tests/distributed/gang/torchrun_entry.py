"""A rank under torchrun: rank 1 of the first start dies before it joins."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from phalanx.gang import init_process_group, torchrun_context


def main() -> None:
    context = torchrun_context({}, lambda kind, **fields: None)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restart == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if restart == 0:
        (Path(sys.argv[1]) / f"restart0-rank{context.rank}").write_text(str(os.getpid()))
    init_process_group(context, 60)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == context.world_size
    (Path(sys.argv[1]) / f"restart{restart}-rank{context.rank}").write_text(str(os.getpid()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
