"""A hand-written loop on one device for `gpu.py`: fp32 masters, bf16 autocast, fused AdamW, each layer compiled; with
`fp8` the linear products of the layers by torchao (tensor-wise scaling). Prints one line a step.

python gpu_bare.py SETTINGS TOKENS cuda|cpu bf16|fp8
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from windows import BETAS, LR, MAX_NORM, WEIGHT_DECAY, Objective, RandomWindows, arguments


def main() -> None:
    settings, tokens = arguments()
    device, precision = sys.argv[3], sys.argv[4]
    torch.manual_seed(0)
    objective = Objective(settings).to(device)
    layers = objective.decoder.layers
    if precision == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=device == "cpu")
        for layer in layers.values():
            convert_to_float8_training(layer, config=config)
    if device == "cuda":
        for layer in layers.values():
            layer.compile()
    optimizer = torch.optim.AdamW(objective.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    windows = DataLoader(RandomWindows(tokens, settings), batch_size=settings.batch, pin_memory=device == "cuda")
    for step, batch in enumerate(windows, 1):
        with torch.autocast(device, torch.bfloat16):
            loss = objective(batch["windows"].to(device, non_blocking=True))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(objective.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
