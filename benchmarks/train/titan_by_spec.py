"""torchtitan's Trainer as 0.2 has it: our model, windows and loss are registered as a TrainSpec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from titan_model import IS_COMPILED, PRECISION, Lines, Windows, begin_weights, positions_of
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer
from windows import BETAS, LR, MAX_NORM, WEIGHT_DECAY, Objective, Settings


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
        begin_weights(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [B, S]."""
        return self.decoder(tokens, positions_of(tokens), None)  # type: ignore[no-any-return]


def _parallelize(model: torch.nn.Module, parallel_dims: Any, job_config: JobConfig) -> torch.nn.Module:
    if IS_COMPILED:
        for layer in model.decoder.layers.values():
            layer.compile()
    if parallel_dims.dp_replicate_enabled:
        from torchtitan.models.llama3.infra.parallelize import apply_ddp

        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=IS_COMPILED)
    return model


class _Trainer(Lines, Trainer):
    pass


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
    config.training.mixed_precision_param = PRECISION
    config.parallelism.data_parallel_replicate_degree = ranks
    config.parallelism.data_parallel_shard_degree = 1
    config.metrics.log_freq = 1
    return config


def trainer_of(settings: Settings, tokens: str, ranks: int, folder: str) -> Trainer:
    """A trainer of these windows that prints a line a step. folder: for what it writes."""
    register_train_spec(
        "phalanx-decoder",
        TrainSpec(
            model_cls=_Model,
            model_args={"given": _Args(settings=settings)},
            parallelize_fn=_parallelize,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda dp_world_size, dp_rank, **_: Windows(tokens, settings, dp_rank, dp_world_size),
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
        ),
    )
    return _Trainer(_config(settings, ranks, folder))
