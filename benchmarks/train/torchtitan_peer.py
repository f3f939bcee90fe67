"""One rank of torchtitan's Trainer (0.2.1) with the model, batch and optimizer of `loop.py`; prints a line a step.

The model, windows and loss are ours, registered as a TrainSpec; trainer, optimizer, schedule, clipping, replication and
metrics are torchtitan's, with its defaults where nothing else is said. Nothing is saved, and the loss is logged every
step, as on the other side.

RANK=0 WORLD_SIZE=1 ... python torchtitan_peer.py SETTINGS TOKENS RENDEZVOUS [cpu|cuda]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import titan_device
import torch
from torch.utils.data import DataLoader
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer
from windows import BETAS, LR, MAX_NORM, WEIGHT_DECAY, Objective, RandomWindows, Settings, arguments

IS_COMPILED = titan_device.NAME == "cuda"


@dataclass
class _Args(BaseModelArgs):
    settings: Settings | None = None

    def update_from_config(self, job_config: JobConfig, **_: Any) -> None:
        """Nothing: the settings say all."""

    def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and 6 operations for each a token: only told, never compared."""
        count = sum(parameter.numel() for parameter in model.parameters())
        return count, 6 * count


class _Model(torch.nn.Module):
    """Logits of tokens; positions are those of whole windows."""

    def __init__(self, args: _Args) -> None:
        super().__init__()
        assert args.settings is not None, "the one flavor has them"
        self.decoder = Objective(args.settings).decoder

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Of torch's own modules."""
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif isinstance(getattr(module, "weight", None), torch.nn.Parameter):
                torch.nn.init.ones_(module.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [B, S]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.decoder(tokens, positions, None)  # type: ignore[no-any-return]


class _Windows:
    """What torchtitan asks of its loader, over the windows of all peers; this rank's part of each step."""

    def __init__(self, tokens: str, settings: Settings, rank: int, ranks: int) -> None:
        self._windows = RandomWindows(tokens, settings)
        mine = range(rank, len(self._windows), ranks)
        pinned = titan_device.NAME == "cuda"
        self._loader = DataLoader(self._windows, settings.batch // ranks, sampler=mine, pin_memory=pinned)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self._loader:
            yield {"input": batch["windows"][:, :-1]}, batch["windows"][:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is restored."""


def _parallelize(model: torch.nn.Module, parallel_dims: Any, job_config: JobConfig) -> torch.nn.Module:
    if IS_COMPILED:
        for layer in model.decoder.layers.values():
            layer.compile()
    if parallel_dims.dp_replicate_enabled:
        from torchtitan.models.llama3.infra.parallelize import apply_ddp

        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=IS_COMPILED)
    return model


class _Trainer(Trainer):
    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if torch.distributed.get_rank() == 0:
            print(f"step {self.step}", flush=True)


def _config(settings: Settings, ranks: int, folder: str) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = "phalanx-decoder", "given"
    config.optimizer.lr, config.optimizer.weight_decay = LR, WEIGHT_DECAY
    config.optimizer.beta1, config.optimizer.beta2 = BETAS
    config.optimizer.implementation = "fused"
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.decay_type, config.lr_scheduler.min_lr_factor = "cosine", 0.1
    config.training.local_batch_size = settings.batch // ranks
    config.training.seq_len, config.training.steps = settings.seq_len, settings.steps
    config.training.max_norm = MAX_NORM
    config.training.mixed_precision_param = "bfloat16" if titan_device.NAME == "cuda" else "float32"
    config.parallelism.data_parallel_replicate_degree = ranks
    config.parallelism.data_parallel_shard_degree = 1
    config.metrics.log_freq = 1
    return config


def main() -> None:
    settings, tokens = arguments()
    register_train_spec(
        "phalanx-decoder",
        TrainSpec(
            model_cls=_Model,
            model_args={"given": _Args(settings=settings)},
            parallelize_fn=_parallelize,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda dp_world_size, dp_rank, **_: _Windows(tokens, settings, dp_rank, dp_world_size),
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
        ),
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Trainer(_config(settings, int(os.environ["WORLD_SIZE"]), folder))
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
