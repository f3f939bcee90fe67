"""One rank of Hugging Face's Trainer with the model, batch and optimizer of `loop.py`; prints a line a step.

Its defaults where nothing else is said; nothing is saved, and the loss is told every step, as on the other side.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from windows import BETAS, LR, MAX_NORM, WEIGHT_DECAY, Objective, RandomWindows, arguments


class _Lines(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}", flush=True)


def main() -> None:
    settings, tokens = arguments()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        chosen = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo" if int(os.environ["WORLD_SIZE"]) > 1 else None,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch // int(os.environ["WORLD_SIZE"]),
            learning_rate=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="cosine",
            optim="adamw_torch_fused",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(Objective(settings), chosen, train_dataset=RandomWindows(tokens, settings))
        trainer.add_callback(_Lines())
        trainer.train()


if __name__ == "__main__":
    main()
