"""One rank of a hand-written training loop, as little as torch lets one write: what `loop.py` holds Phalanx against.

Windows at random places of a flat file of uint16 tokens, the model of `settings.json` in fp32, cross-entropy, clipping,
fused AdamW with a cosine schedule, DistributedDataParallel where there are several ranks. Prints one line a step.

RANK=0 WORLD_SIZE=1 python bare.py SETTINGS TOKENS RENDEZVOUS
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder


def main() -> None:
    settings, tokens_path, rendezvous = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], sys.argv[3]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    plain = Decoder(DecoderArgs.of_plain(settings["model"]))
    model: nn.Module = plain
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = np.memmap(tokens_path, dtype=np.uint16, mode="r")
    seq_len, batch, steps = settings["seq_len"], settings["batch"] // world_size, settings["steps"]
    drawn = np.random.default_rng(rank)
    positions = torch.arange(seq_len).expand(batch, seq_len)
    for step in range(1, steps + 1):
        starts = drawn.integers(0, len(tokens) - seq_len - 1, batch)
        windows = torch.from_numpy(np.stack([tokens[at : at + seq_len + 1].astype(np.int64) for at in starts]))
        logits = model(windows[:, :-1], positions, None)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(told)
        if rank == 0:
            print(f"step {step} loss {told.item() / world_size:.4f} norm {norm.item():.4f}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
