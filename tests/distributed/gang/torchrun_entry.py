"""A rank under torchrun: rank 1 of the first start dies once both have met, so the store keeps both addresses."""

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
    init_process_group(context, 60)
    mark = Path(sys.argv[1]) / f"restart{restart}-rank{context.rank}"
    if context.rank == 0:
        mark.write_text(str(os.getpid()))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == context.world_size
    if restart == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mark.write_text(str(os.getpid()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
