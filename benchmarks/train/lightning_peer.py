"""One rank of Lightning's Trainer with the model, batch and optimizer of `loop.py`; prints a line a step.

Its defaults where nothing else is said; nothing is saved, and the loss is told every step, as on the other side.
"""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader
from windows import (
    BETAS,
    LR,
    MAX_NORM,
    WEIGHT_DECAY,
    Objective,
    RandomWindows,
    Settings,
    arguments,
    lr_factor,
)


class _Training(lightning.LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self.objective = Objective(settings)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.objective(batch["windows"])["loss"]
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        steps = self._settings.steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step + 1, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Lines(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["loss"])
            print(f"step {trainer.global_step} loss {loss:.4f}", flush=True)


def main() -> None:
    settings, tokens = arguments()
    ranks = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=settings.steps,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Lines()],
    )
    windows = DataLoader(RandomWindows(tokens, settings), batch_size=settings.batch // ranks, shuffle=True)
    trainer.fit(_Training(settings), windows)


if __name__ == "__main__":
    main()
