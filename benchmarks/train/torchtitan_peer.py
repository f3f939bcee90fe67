"""One rank of torchtitan's Trainer with the model, batch and optimizer of `loop.py`; prints a line a step.

The model, windows and loss are ours; trainer, optimizer, schedule, clipping, replication and metrics are torchtitan's,
with its defaults where nothing else is said. Nothing is saved, and the loss is logged every step, as on the other side.
0.2 and 0.3 take a model in ways of their own: titan_by_spec.py, titan_by_config.py.

RANK=0 WORLD_SIZE=1 ... python torchtitan_peer.py SETTINGS TOKENS RENDEZVOUS [cpu|cuda]
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile

import titan_device  # noqa: F401 (before all of torchtitan)
import torch
from windows import arguments


def main() -> None:
    if importlib.metadata.version("torchtitan").startswith("0.2."):
        from titan_by_spec import trainer_of
    else:
        from titan_by_config import trainer_of
    settings, tokens = arguments()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(settings, tokens, int(os.environ["WORLD_SIZE"]), folder)
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
